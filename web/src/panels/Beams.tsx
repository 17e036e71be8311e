// A beam search as a tree: every continuation that the engine tried, what became of it, and where greedy decoding goes.
// Tokens in a row without a fork are one line; a line's children stand under it.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call, post } from "../visit/api";
import * as nextRun from "../run/next-run";
import { count, figures, plural, pointed } from "../ui/format";
import { model, site } from "../visit/store";
import { quoted } from "../ui/text";
import { BEAM_CARD, type BeamCard, type BeamNode } from "../schema/beams";
import { Datum, Failed, Whole, asked } from "./common";
import { Lead } from "../ui/Lead";
import "../style/panels/beams.css";

const found = asked<BeamCard>();
const beams = signal<number | null>(4);
const tokens = signal<number | null>(14);
const all = signal(true); // dropped branches too

const search = (): void =>
  void found.ask(() =>
    site.value !== null
      ? call<BeamCard>("beams.json")
      : call<BeamCard>("beams", {
          ...post({ prompt: nextRun.prompt.value, beams: beams.value ?? 4, max_tokens: tokens.value ?? 14 }),
          timeout: 120_000,
        }),
  );

export default function Beams() {
  useEffect(() => {
    const can = site.peek() !== null || (model.peek() !== null && nextRun.prompt.peek() !== "");
    if (can && found.value.peek() === null && !found.busy.peek()) search();
  }, [model.value]);
  const card = found.value.value;
  return (
    <>
      <Lead result={card ? result(card) : ""}>
        A beam search continues several texts at once and returns the most probable one. It starts from the prompt
        above. The tree shows every text that it kept, and the one that greedy decoding writes.
      </Lead>
      {site.value === null && <Dials />}
      <Failed of={found} />
      {card && <Shown card={card} />}
    </>
  );
}

function result({ beams, gain, parted }: BeamCard): string {
  if (parted === null) return `The best of ${beams} beams is the text that greedy decoding writes.`;
  return `The best of ${beams} beams is ${figures(Math.exp(gain))} times as probable as the text of greedy decoding, which parts after ${plural(parted, "token")}.`;
}

function Dials() {
  return (
    <form
      class="panel-form"
      onSubmit={(event) => {
        event.preventDefault();
        search();
      }}
    >
      <Whole name="beams" value={beams} least={2} most={8} placeholder="4" />
      <Whole name="tokens" value={tokens} least={1} most={64} placeholder="14" />
      <button type="submit" class="panel-go" disabled={found.busy.value || nextRun.prompt.value === ""}>
        {found.busy.value ? "Searching…" : "Search"}
      </button>
    </form>
  );
}

function Shown({ card }: { card: BeamCard }) {
  return (
    <>
      <ol class="beam-texts">
        {card.best.map((text, rank) => (
          <li key={text.node} class={rank === 0 ? "best" : ""}>
            <b>{rank + 1}</b>
            <span class="beam-text" translate={false}>
              {text.text.trim()}
            </span>
            <span class="beam-score" title="sum of log-probabilities; divided by the tokens">
              {pointed(text.sum.toFixed(2))} nat; {pointed(text.score.toFixed(3))} a token;{" "}
              {ENDS[text.reason] ?? text.reason}
            </span>
          </li>
        ))}
        <li class="greedy">
          <b>G</b>
          <span class="beam-text" translate={false}>
            {card.greedy_text.trim()}
          </span>
          <span class="beam-score">{pointed(card.greedy_sum.toFixed(2))} nat; greedy</span>
        </li>
      </ol>
      <dl class="panel-figures">
        {(["best_sum", "greedy_sum", "gain"] as const).map((field) => (
          <Datum key={field} of={card} table={BEAM_CARD} field={field} name={`beams_${field}`} />
        ))}
      </dl>
      <h2>
        The tree <span class="under">{plural(card.nodes.length, "token")} kept on the way</span>
      </h2>
      <button type="button" aria-pressed={all.value} onClick={() => (all.value = !all.value)}>
        Show dropped branches
      </button>
      <div class="panel-scroll" tabIndex={0}>
        <ul class="beam-tree" aria-label="The tree of the search">
          <li>
            <span class="beam-root">{quoted(card.prompt.slice(-32))}</span>
            <Children of={-1} card={card} children={childrenOf(card.nodes)} />
          </li>
        </ul>
      </div>
    </>
  );
}

const ENDS: Record<string, string> = {
  eos: "ended by the model",
  stop: "a stop text",
  length: "cut at its length",
  context: "the context is full",
};

type Children = ReadonlyMap<number, readonly number[]>;

function childrenOf(nodes: readonly BeamNode[]): Children {
  const found = new Map<number, number[]>();
  nodes.forEach(({ parent }, i) => found.set(parent, [...(found.get(parent) ?? []), i]));
  return found;
}

/** Whether a text that the search found goes through a node. */
function alive(i: number, card: BeamCard, children: Children): boolean {
  return card.nodes[i]?.rank != null || (children.get(i) ?? []).some((child) => alive(child, card, children));
}

function Children({ of, card, children }: { of: number; card: BeamCard; children: Children }) {
  const mine = (children.get(of) ?? []).filter((i) => all.value || alive(i, card, children));
  if (mine.length === 0) return null;
  return (
    <ul>
      {mine.map((i) => (
        <Branch key={i} first={i} card={card} children={children} />
      ))}
    </ul>
  );
}

/** A token, and those after it up to the next fork. */
function Branch({ first, card, children }: { first: number; card: BeamCard; children: Children }) {
  const line = [first];
  for (;;) {
    const next = children.get(line.at(-1) as number) ?? [];
    const here = card.nodes[line.at(-1) as number];
    const same = next.length === 1 && card.nodes[next[0] as number]?.greedy === here?.greedy && here?.rank == null;
    if (!same) break;
    line.push(next[0] as number);
  }
  const end = line.at(-1) as number;
  const last = card.nodes[end];
  if (last === undefined) return null;
  const dead = !alive(first, card, children);
  const text = line.map((i) => card.nodes[i]?.token.text ?? "").join("");
  const best = card.best[0] && onWay(card, card.best[0].node, end);
  return (
    <li class={`${dead ? "dropped" : ""} ${best ? "best" : ""}`}>
      <span
        class="beam-line"
        data-greedy={last.greedy}
        data-rank={last.rank ?? ""}
        title={dead ? "no text continues from here" : ""}
      >
        {last.greedy && (
          <span class="beam-mark" title="the text of greedy decoding">
            G
          </span>
        )}
        <span class="beam-text" translate={false}>
          {text.replaceAll("\n", "⏎")}
        </span>
        <span class="beam-score">{pointed(last.score.toFixed(2))}</span>
        {last.rank !== null && <b class="beam-rank">{ordinal(last.rank)}</b>}
      </span>
      <Children of={end} card={card} children={children} />
    </li>
  );
}

const ordinal = (rank: number): string => (rank === 0 ? "best" : `${count(rank + 1)}.`);

function onWay(card: BeamCard, from: number, node: number): boolean {
  for (let at = from; at >= 0; at = card.nodes[at]?.parent ?? -1) if (at === node) return true;
  return false;
}
