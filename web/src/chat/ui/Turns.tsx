// The turns of the branch that is followed: what was said, what it cost, and the ways to go on from it.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { modelName, percent } from "../../ui/format";
import { Icon } from "../../ui/icons";
import { Figure } from "../../ui/Stat";
import { current, edit, follow, model, regenerate, turns, writing } from "../store";
import { type Facts, type Turn, place } from "../tree";
import { Markdown } from "./Markdown";
import { Pictures } from "./Pictures";

const NEAR = 80; // px from the end within which the view goes along with what is written

export function Turns() {
  const pane = useRef<HTMLDivElement>(null);
  const all = turns.value;
  const near = useRef(true);
  useEffect(() => {
    if (near.current) pane.current?.scrollTo({ top: pane.current.scrollHeight });
  }, [all]);
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = pane.current ?? {
      scrollHeight: 0,
      scrollTop: 0,
      clientHeight: 0,
    };
    near.current = scrollHeight - scrollTop - clientHeight < NEAR;
  };
  return (
    <div class="turns" ref={pane} onScroll={scrolled} tabIndex={0} aria-label="Turns" role="region">
      <div class="turns-inner">
        {all.map((turn) =>
          turn.role === "user" ? <Said key={turn.id} turn={turn} /> : <Answered key={turn.id} turn={turn} />,
        )}
      </div>
    </div>
  );
}

function Said({ turn }: { turn: Turn }) {
  const editing = useSignal<string | null>(null);
  const text = editing.value;
  if (text !== null)
    return (
      <article class="turn user" data-turn={turn.id}>
        <form
          class="edit"
          onSubmit={(event) => {
            event.preventDefault();
            editing.value = null;
            edit(turn, text);
          }}
        >
          <textarea
            aria-label="Edited message"
            rows={Math.min(10, text.split("\n").length + 1)}
            value={text}
            onInput={(event) => (editing.value = event.currentTarget.value)}
          />
          <div class="turn-tools">
            <button type="submit">Say this instead</button>
            <button type="button" class="quiet" onClick={() => (editing.value = null)}>
              Cancel
            </button>
          </div>
        </form>
      </article>
    );
  return (
    <article class="turn user" data-turn={turn.id} aria-label="You">
      <Pictures urls={turn.pictures ?? []} />
      <p class="said" translate={false}>
        {turn.text}
      </p>
      <div class="turn-tools">
        <Branches turn={turn} />
        <button
          type="button"
          class="quiet"
          disabled={writing.value !== null}
          onClick={() => (editing.value = turn.text)}
        >
          Edit
        </button>
      </div>
    </article>
  );
}

function Answered({ turn }: { turn: Turn }) {
  const busy = writing.value !== null;
  return (
    <article
      class="turn assistant"
      data-turn={turn.id}
      data-state={turn.state}
      aria-label={modelName(model.value?.name ?? "The model")}
    >
      {turn.thought !== "" && (
        <details class="thought">
          <summary>What it thought</summary>
          <p class="said" translate={false}>
            {turn.thought}
          </p>
        </details>
      )}
      {model.value?.template === false ? (
        <p class="said" translate={false}>
          {turn.text}
        </p>
      ) : (
        <Markdown text={turn.text} />
      )}
      {turn.state === "writing" && <span class="caret" aria-hidden="true" />}
      {turn.state === "failed" && (
        <p class="failed" role="alert">
          {turn.error}
        </p>
      )}
      {turn.state === "stopped" && <p class="under">Stopped.</p>}
      {turn.finish === "length" && <p class="under">Cut: max tokens, or the context is full.</p>}
      {turn.facts && <Cost facts={turn.facts} />}
      <div class="turn-tools">
        <Branches turn={turn} />
        <button type="button" class="quiet" disabled={busy} onClick={() => regenerate(turn)}>
          Regenerate
        </button>
        <Inside turn={turn} />
      </div>
    </article>
  );
}

function Branches({ turn }: { turn: Turn }) {
  const conversation = current.value;
  if (conversation === null) return null;
  const { index, count } = place(conversation, turn.id);
  if (count < 2) return null;
  return (
    <span class="branches" role="group" aria-label="Versions">
      <button type="button" class="quiet square" aria-label="Version before" onClick={() => follow(turn.id, -1)}>
        <Icon name="back" />
      </button>
      <span class="branch-count">
        {index + 1}/{count}
      </span>
      <button type="button" class="quiet square" aria-label="Version after" onClick={() => follow(turn.id, 1)}>
        <Icon name="forward" />
      </button>
    </span>
  );
}

/** What the cache reused of the prompt, and how fast the answer came. */
function Cost({ facts }: { facts: Facts }) {
  const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: written, decode_ms: decode } = facts;
  const speed = written > 1 && decode > 0 ? (written - 1) / (decode / 1000) : null;
  return (
    <dl class="cost">
      <div>
        <dt>prompt</dt>
        <dd>
          <Figure name="prompt_tokens" value={prompt} source="counted" unit="tokens" meaning="tokens of the prompt" />
        </dd>
      </div>
      <div class="reused" title={`${percent(prompt === 0 ? 0 : cached / prompt)} of the prompt`}>
        <dt>from the cache</dt>
        <dd>
          <span class="result-bar kept" aria-hidden="true">
            <span style={{ width: `${prompt === 0 ? 0 : (100 * cached) / prompt}%` }} />
          </span>
          <Figure
            name="cached_tokens"
            value={cached}
            source="counted"
            unit="tokens"
            meaning="tokens of the prompt whose K and V were found in the cache"
          />
        </dd>
      </div>
      {facts.disk_tokens > 0 && (
        <div>
          <dt>from disk</dt>
          <dd>
            <Figure
              name="disk_tokens"
              value={facts.disk_tokens}
              source="counted"
              unit="tokens"
              meaning="read from --kv-disk"
            />
          </dd>
        </div>
      )}
      <div>
        <dt>written</dt>
        <dd>
          <Figure
            name="completion_tokens"
            value={written}
            source="counted"
            unit="tokens"
            meaning="tokens of the answer"
          />
        </dd>
      </div>
      <div>
        <dt>first token after</dt>
        <dd>
          <Figure
            name="ttft_ms"
            value={1000 * (facts.queue_ms + facts.prefill_ms)}
            source="measured"
            unit="us"
            meaning="waiting and prefill, by the server's clock"
          />
        </dd>
      </div>
      <div>
        <dt>speed</dt>
        <dd>
          <Figure
            name="tokens_per_s"
            value={speed}
            source="measured"
            unit="tok/s"
            meaning="tokens after the first, over the time from first to last"
          />
        </dd>
      </div>
    </dl>
  );
}

/** The way to the explorer: the same prompt, seed and options, one token at a time. */
function Inside({ turn }: { turn: Turn }) {
  const conversation = current.value;
  if (conversation === null || turn.asked === null || turn.state === "writing") return null;
  if (model.value?.traced === false)
    return (
      <span class="under" title="Start the server with --explorer, or use tokenwright explore">
        no runs are traced here
      </span>
    );
  return (
    <a class="inside" href={`./#inside=${conversation.id}.${turn.id}`}>
      Look inside
    </a>
  );
}
