// One token in one layer: the vectors on its way, with shapes, norms and FLOPs. The engine runs the token again, read-only,
// on the same weights and cache; nothing here is computed by the page but the widths of bars.

import { effect, signal, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call } from "../visit/api";
import { count, figures, flop, joined, numbered, percent, plural } from "../ui/format";
import { select, selected } from "../run/answers/attention-row";
import { card, frame, run } from "../visit/store";
import { marked, nameOf } from "../ui/text";
import { BLOCK_STAGE, BLOCK_VIEW, type BlockStage, type BlockView } from "../schema/block";
import { Lead } from "../ui/Lead";
import { Badge } from "../ui/Stat";
import { chosenCell } from "../stage/cell-pointer";
import { Datum, Failed, Nothing, asked, present, useRested } from "./common";
import "../style/panels/block.css";

const COLUMNS = 28; // tokens of the small wall

const view = asked<BlockView>();
const followed = signal(true); // the newest token is shown, whichever it is
const position = signal(0);

const NAMES: Record<string, readonly [name: string, meaning: string]> = {
  input: ["Residual stream", "what the layers before have made of the token"],
  norm: ["Norm", "scaled to √width, times learned gains"],
  query: ["Q", "what the token looks for: used once, then thrown away"],
  key: ["K", "how later tokens find it: kept in the cache"],
  value: ["V", "what later tokens read from it: kept in the cache"],
  attention: ["Attention", "the values of the tokens that it reads, weighted"],
  output: ["+ attention", "projected back, and added to the stream"],
  residual: ["Residual stream", "with what attention has read"],
  mlp_norm: ["Norm", "scaled to √width, times learned gains"],
  hidden: ["MLP, inside", "one token alone: it reads no other"],
  mlp_output: ["+ MLP", "projected back, and added to the stream"],
  result: ["Residual stream", "what the next layer gets"],
};
const STREAM = ["input", "residual", "result"];

export default function Block() {
  const step = frame.value;
  const newest = step === null ? 0 : step.start + step.length - 1;
  const at = followed.value ? newest : Math.min(position.value, newest);
  const { layer } = selected.value;
  useEffect(() => effect(take), []);
  useRested(
    (id, n) => void view.ask(() => call<BlockView>(`runs/${id}/block?step=${n}&layer=${layer}&position=${at}`)),
    layer,
    at,
  );
  const found = view.value.value;
  return (
    <>
      <Lead result={found && present() ? result(found) : ""}>
        One token on its way through one layer: what it reads, what is added to it, and what that costs. Click a cell of
        the wall, or choose here.
      </Lead>
      {step === null || !present() ? (
        <Nothing />
      ) : (
        <>
          <Choose at={at} newest={newest} layer={layer} />
          <Failed of={view} />
          {found && <Shown view={found} />}
        </>
      )}
    </>
  );
}

function result({ position, layer, context, flops, stages }: BlockView): string {
  const share = (...names: string[]) =>
    percent(stages.reduce((sum, stage) => sum + (names.includes(stage.name) ? stage.share : 0), 0));
  const word = run.value?.called(position);
  return `${word} took ${joined(flop(flops))} in layer ${layer}: ${share("hidden", "mlp_output")} in the MLP, ${share("attention")} in attention to ${plural(context, "token")}.`;
}

/** Shows the cell that was clicked on the stage. It runs within the click: drawn later, it would undo a newer choice. */
function take(): void {
  const cell = chosenCell.value;
  if (cell === null) return;
  untracked(() => {
    choose(cell.position);
    if (cell.layer !== null) select(cell.layer, selected.peek().head);
    chosenCell.value = null;
  });
}

function choose(next: number): void {
  followed.value = false;
  position.value = next;
}

function Choose({ at, newest, layer }: { at: number; newest: number; layer: number }) {
  const layers = card.value?.layers ?? 1;
  const { head } = selected.value;
  return (
    <div class="block-choose">
      <Wall at={at} newest={newest} layer={layer} layers={layers} />
      <label>
        <span>
          position {numbered(at)}, <b>{run.value?.called(at)}</b>
        </span>
        <input
          type="range"
          aria-label="token of the block view"
          min={0}
          max={newest}
          value={at}
          onInput={(event) => choose(Number(event.currentTarget.value))}
        />
      </label>
      <label>
        <span>
          layer <b>{layer}</b> of 0–{layers - 1}
        </span>
        <input
          type="range"
          aria-label="layer of the block view"
          min={0}
          max={layers - 1}
          value={layer}
          onInput={(event) => select(Number(event.currentTarget.value), head)}
        />
      </label>
      <button type="button" aria-pressed={followed.value} onClick={() => (followed.value = !followed.value)}>
        Follow the newest token
      </button>
    </div>
  );
}

/** The wall in small: the tokens around the chosen one. Keys have the sliders. */
function Wall({ at, newest, layer, layers }: { at: number; newest: number; layer: number; layers: number }) {
  const first = Math.max(0, Math.min(at - COLUMNS / 2, newest + 1 - COLUMNS));
  const columns = Array.from({ length: Math.min(COLUMNS, newest + 1) }, (_, i) => first + i);
  return (
    <div class="block-wall" aria-hidden="true" style={{ gridTemplateColumns: `repeat(${columns.length}, 1fr)` }}>
      {columns.map((p) => (
        <span key={`t${p}`} class={`block-token ${p === at ? "now" : ""}`}>
          {nameOf(marked(run.value?.tokens[p]?.text ?? ""), p)}
        </span>
      ))}
      {Array.from({ length: layers }, (_, l) =>
        columns.map((p) => (
          <span
            key={`${l}/${p}`}
            class={`block-cell ${p === at && l === layer ? "now" : ""}`}
            data-cell={`${p}/${l}`}
            title={`position ${numbered(p)}, layer ${l}`}
            onClick={() => {
              choose(p);
              select(l, selected.peek().head);
            }}
          />
        )),
      )}
    </div>
  );
}

function Shown({ view: found }: { view: BlockView }) {
  const most = Math.max(...found.stages.map(({ norm }) => norm), 1e-9);
  return (
    <>
      <dl class="panel-figures">
        {(["context", "kv_bytes", "flops", "model_flops"] as const).map((field) => (
          <Datum key={field} of={found} table={BLOCK_VIEW} field={field} name={`block_${field}`} />
        ))}
      </dl>
      <ol class="block-stages">
        {found.stages.map((stage) => (
          <Stage key={stage.name} stage={stage} most={most} first={found.layer === 0 && stage.name === "input"} />
        ))}
      </ol>
      <Reads view={found} />
      <Growth view={found} />
    </>
  );
}

function Stage({ stage, most, first }: { stage: BlockStage; most: number; first: boolean }) {
  const [name, meaning] = first
    ? ["Embedding", "the row of the table for this token"]
    : (NAMES[stage.name] ?? [stage.name, ""]);
  const heads = Math.max(...stage.heads, 1e-9);
  const kept = stage.name === "key" || stage.name === "value";
  return (
    <li class={STREAM.includes(stage.name) ? "stream" : kept ? "kept" : ""} data-stage={stage.name}>
      <span class="block-name">
        {name} <span class="under">{meaning}</span>
      </span>
      <span class="block-shape">{stage.shape.map(count).join(" × ")}</span>
      <span class="block-norm" title={BLOCK_STAGE["norm"]?.meaning ?? ""}>
        {stage.heads.length > 0 ? (
          <span class="block-heads" aria-hidden="true">
            {stage.heads.map((norm, head) => (
              <i
                key={head}
                style={{ height: `${(100 * norm) / heads}%` }}
                title={`head ${head}: norm ${figures(norm)}`}
              />
            ))}
          </span>
        ) : (
          <span class="block-bar" aria-hidden="true">
            <i style={{ width: `${(100 * stage.norm) / most}%` }} />
          </span>
        )}
        <span class="value" data-norm={stage.norm}>
          <span class="under">length</span> {figures(stage.norm)}
        </span>
        <Badge source="read" meaning={BLOCK_STAGE["norm"]?.meaning ?? ""} />
      </span>
      <span class="block-cost">
        {stage.flops > 0 && (
          <>
            <span class="value" data-flops={stage.flops}>
              {joined(flop(stage.flops))}
            </span>
            <span class="under"> {percent(stage.share)}</span>
            <Badge source="derived" meaning={BLOCK_STAGE["flops"]?.meaning ?? ""} />
          </>
        )}
      </span>
    </li>
  );
}

function Reads({ view: found }: { view: BlockView }) {
  const { head } = selected.value;
  return (
    <>
      <h3>What each head of layer {found.layer} read most</h3>
      <ul class="block-reads">
        {found.reads.map((read) => (
          <li key={read.head}>
            <button
              type="button"
              aria-pressed={read.head === head}
              onClick={() => select(found.layer, read.head)}
              title={`position ${numbered(read.position)}`}
            >
              head {read.head} <b>{run.value?.called(read.position)}</b> {percent(read.weight)}
            </button>
          </li>
        ))}
      </ul>
    </>
  );
}

/** Attention's part of the work grows with the text; that of the products with the weights does not. */
function Growth({ view: found }: { view: BlockView }) {
  return (
    <>
      <h3>
        Attention's share of the layer's FLOPs{" "}
        <Badge source="derived" meaning="4 H D for each token read, against 2 x weights for each product" />
      </h3>
      <dl class="block-growth">
        {found.by_context.map(({ context, share }) => (
          <div key={context} class={context === found.context ? "now" : ""}>
            <dt>at {plural(context, "token")}</dt>
            <dd>
              <span class="block-bar" aria-hidden="true">
                <i style={{ width: `${share * 100}%` }} />
              </span>
              {percent(share)}
            </dd>
          </div>
        ))}
      </dl>
    </>
  );
}
