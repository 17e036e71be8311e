// The card that sets training beside the loop: the text on the stage, scored in one teacher-forced pass, with the loss
// of every position under the causal mask, beside the steps in which the loop wrote it.

import { useSignal } from "@preact/signals";
import { numbered, pointed, sentence } from "../../ui/format";
import * as player from "../../run/play/player";
import type { Losses } from "../../schema/learn";
import { last, live, run, totals } from "../../visit/store";
import { quoted } from "../../ui/text";
import { Total } from "../Instruments";
import { Figure } from "../../ui/Stat";
import { Facts } from "./Facts";
import * as server from "./server";

const ROWS = 24; // of the mask that are drawn

export function Training() {
  const found = useSignal<Losses | null>(null);
  const failure = useSignal("");
  const busy = useSignal(false);
  const chosen = useSignal(1);
  const ids = run.value?.tokens.map(({ id }) => id) ?? [];
  const score = async () => {
    busy.value = true;
    failure.value = "";
    try {
      found.value = await server.score(ids);
      chosen.value = 1;
    } catch (error) {
      failure.value = sentence(error instanceof Error ? error.message : String(error));
    } finally {
      busy.value = false;
    }
  };
  const losses = found.value;
  return (
    <>
      <div class="learn-drives">
        <button type="button" class="learn-drive" disabled={busy.value || ids.length < 2} onClick={() => void score()}>
          Score the text on the stage in one pass
        </button>
      </div>
      {failure.value !== "" && <p class="learn-verdict wrong">{failure.value}</p>}
      {losses !== null && (
        <>
          <Chart losses={losses} at={chosen.value} choose={(at) => show(losses, (chosen.value = at))} />
          <div class="learn-beside">
            <section aria-label="One pass, as in training">
              <h4>One pass</h4>
              <Mask rows={losses.tokens.length} at={chosen.value} />
              <Facts of={losses.facts} prefix="pass" />
            </section>
            <section aria-label="The loop, as in inference">
              <h4>The loop</h4>
              <p class="learn-note">
                {live.value ? "This run, step by step:" : "The run that is shown, step by step:"}
              </p>
              <dl class="learn-facts">
                <div>
                  <dt>passes</dt>
                  <dd>
                    <Figure
                      name="loop_passes"
                      value={last.value + 1}
                      source="counted"
                      unit=""
                      meaning="steps of this run so far"
                    />
                  </dd>
                </div>
                <div>
                  <dt>tokens through the layers, up to this step</dt>
                  <dd>
                    <Total name="forward_tokens" value={totals.value?.forward_tokens} unit="tokens" />
                  </dd>
                </div>
                <div>
                  <dt>its time, up to this step</dt>
                  <dd>
                    <Total name="step_us" value={totals.value?.step_us} unit="us" measured />
                  </dd>
                </div>
              </dl>
            </section>
          </div>
        </>
      )}
    </>
  );
}

/** Moves the stage to the step that wrote the token at a position; the prompt's were read in the first. */
function show(losses: Losses, at: number): void {
  const current = run.value;
  if (current === null || losses.tokens[at]?.id !== current.tokens[at]?.id) return;
  const step = current.frames.findIndex(({ seq_len }) => seq_len === at + 1);
  player.seek(Math.max(0, step));
}

function Chart({ losses, at, choose }: { losses: Losses; at: number; choose: (at: number) => void }) {
  const most = Math.max(...losses.losses.map((loss) => loss ?? 0), 1e-9);
  const token = losses.tokens[at];
  const loss = losses.losses[at] ?? null;
  return (
    <figure class="learn-losses">
      <figcaption>
        Loss of each token after those before it. Token {numbered(at)}, {quoted(token?.text ?? "")}:{" "}
        <Figure name="loss_at" value={loss} source="read" unit="nat" meaning="−log p of this token, teacher-forced" />
      </figcaption>
      <div class="learn-bars" aria-hidden="true">
        {losses.losses.map((value, place) => (
          <span
            key={place}
            class={place === at ? "now" : ""}
            style={{ height: `${((value ?? 0) / most) * 100}%` }}
            onClick={() => place > 0 && choose(place)}
          />
        ))}
      </div>
      <input
        type="range"
        min={1}
        max={losses.tokens.length - 1}
        value={at}
        aria-label="token of the text"
        aria-valuetext={`token ${numbered(at)}, ${quoted(token?.text ?? "")}, loss ${pointed((loss ?? 0).toFixed(2))} nat`}
        onInput={(event) => choose(Number(event.currentTarget.value))}
      />
    </figure>
  );
}

/** The causal mask: row t may read the columns 1 to t. Of a long text a part is drawn. */
function Mask({ rows, at }: { rows: number; at: number }) {
  const shown = Math.min(rows, ROWS);
  const first = Math.max(0, Math.min(rows - shown, at - shown + 1));
  const line = Math.min(shown - 1, at - 1 - first);
  return (
    <svg class="learn-mask" viewBox={`0 0 ${shown} ${shown}`} role="img" aria-label="Causal mask: a triangle">
      {Array.from({ length: shown }, (_, row) => (
        <rect key={row} x={0} y={row + 0.08} width={row + 1} height={0.84} class={row === line ? "now" : ""} />
      ))}
    </svg>
  );
}
