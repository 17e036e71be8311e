// Speculation on the text of the shown run. Drafted tokens are ghosts until the stage comes to their step; then those that
// are kept turn solid, and the others fall. The server runs its scheduler and proposer over the text, without the model.

import { verbatim } from "../language/language";
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call } from "../visit/api";
import { beside, phase, result, verdict } from "../run/text/draft-text";
import { numbered, plural } from "../ui/format";
import * as player from "../run/play/player";
import { marked } from "../ui/text";
import { frame, joined, live, run, site } from "../visit/store";
import { DRAFTS_CARD, type DraftStep, type DraftsCard } from "../schema/drafting";
import type { TokenCard } from "../schema";
import { Datum, Failed, Nothing, asked } from "./common";
import { Lead } from "../ui/Lead";
import "../style/panels/drafts.css";

const PAUSE = 300; // ms from one request to the next, while a text grows

const found = asked<DraftsCard>();
const free = signal(false); // as if a row cost nothing
let latest = "";
let at = -PAUSE;

async function answer(id: string, all: boolean): Promise<DraftsCard> {
  if (site.value === null) return call<DraftsCard>(`runs/${id}/drafts?free=${all}`, { timeout: 60_000 });
  const recorded = await call<Record<string, DraftsCard[]>>("drafts.json");
  const card = recorded[id]?.[all ? 1 : 0];
  if (card === undefined) throw new Error("This site has no drafts of this run.");
  return card;
}

export default function Drafts() {
  const current = run.value;
  const written =
    current === null
      ? 0
      : (void current.count.value, current.tokens.length - current.promptTokens - current.card.written.length);
  const stateful = current?.model.windows.includes(0) ?? false;
  const id =
    site.value !== null ? joined.value : live.value && written > 0 && !stateful ? (current?.id.value ?? null) : null;
  const key = `${id} ${site.value === null ? written : ""} ${free.value}`;
  const busy = found.busy.value;
  useEffect(() => {
    if (id === null || busy || key === latest) return;
    const timer = setTimeout(
      () => {
        [latest, at] = [key, performance.now()];
        void found.ask(() => answer(id, free.value));
      },
      Math.max(0, at + PAUSE - performance.now()),
    );
    return () => clearTimeout(timer);
  }, [key, busy]);
  const card = id === null ? null : found.value.value;
  return (
    <>
      <Lead result={card ? result(card) : ""}>
        A draft guesses tokens from what followed the same words before; one step then checks them all. This run wrote
        one token a step; the engine’s scheduler has gone over its text again with drafts, without the model.
      </Lead>
      {stateful ? (
        <p class="panel-note">
          Layers of this model keep a state, which cannot go back to where a draft was rejected; so it has no drafts.
        </p>
      ) : (
        id === null && <Nothing />
      )}
      <Failed of={found} />
      {card && <Shown card={card} />}
    </>
  );
}

function Shown({ card }: { card: DraftsCard }) {
  const step = frame.value;
  const position = step === null ? -1 : step.seq_len - 1;
  return (
    <>
      <p class="panel-note">{verdict(card)}</p>
      <label class="draft-free">
        <input type="checkbox" checked={free.value} onChange={(event) => (free.value = event.currentTarget.checked)} />
        draft as if each row cost nothing
      </label>
      <div class="draft-steps">
        <Go card={card} position={position} by={-1} />
        <Go card={card} position={position} by={1} />
      </div>
      <ol class="draft-text" aria-label="The text, by step with drafts">
        {card.each.map((one, n) => (
          <Step key={one.position} step={one} n={n} phase={phase(one, position)} />
        ))}
      </ol>
      <p class="panel-legend draft-legend">
        <ins>kept</ins> <del>rejected</del> <span class="draft-ghost">still ahead</span> <b>the shown step</b>
      </p>
      <dl class="panel-figures">
        {(
          ["steps", "tokens", "drafting", "drafted", "kept", "per_step", "cost", "plain_cost", "second_row"] as const
        ).map((field) => (
          <Datum key={field} of={card} table={DRAFTS_CARD} field={field} name={`drafts_${field}`} />
        ))}
      </dl>
      <p class="panel-note">
        The text is the same, bit for bit: a row’s result does not depend on the other rows of its step, each token is
        the sampler’s own draw, and a draft is kept only where it equals that draw.
      </p>
    </>
  );
}

/** Shows the step that wrote the next drafted token, or the one before, on the stage. */
function Go({ card, position, by }: { card: DraftsCard; position: number; by: 1 | -1 }) {
  const place = beside(card.each, position, by);
  const wanted = card.each[place]?.position;
  const index = run.value?.frames.findIndex((one) => one.token !== null && one.seq_len - 1 === wanted) ?? -1;
  return (
    <button type="button" disabled={wanted === undefined || index < 0} onClick={() => player.seek(index)}>
      {by < 0 ? "← Draft before" : "Next draft →"}
    </button>
  );
}

/** The tokens that one step writes: drafts that are kept, and the sampler's own. Drafts that are not kept stand before it. */
function Step({ step: { drafts, kept, written, open }, n, phase }: { step: DraftStep; n: number; phase: string }) {
  const says =
    drafts.length === 0
      ? ""
      : `Step ${numbered(n)}: ${plural(drafts.length, "token")} drafted, ${open ? "not decided yet" : `${kept} kept`}. `;
  return (
    <li
      class={`draft-step ${phase} ${drafts.length > 0 ? "drafted" : ""}`}
      title={says}
      aria-current={phase === "now" ? "step" : undefined}
    >
      {says !== "" && <span class="sr">{says}</span>}
      {drafts.map((token, place) => {
        const Tag = place < kept ? "ins" : open ? "span" : "del";
        return (
          <Tag key={place} class={Tag === "span" ? "draft-ghost" : ""}>
            {look(token)}
          </Tag>
        );
      })}
      {!open && written.slice(kept).map((token) => look(token))}
    </li>
  );
}

const look = ({ text }: TokenCard): string =>
  text.trim() === "" ? marked(text) : verbatim(text.replaceAll("\n", "⏎"));
