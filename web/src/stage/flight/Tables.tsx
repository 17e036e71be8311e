// The tables of a flight: the tokens that are read, the layers, the probabilities, and the draw.

import { verbatim } from "../../language/language";
import { useEffect, useRef } from "preact/hooks";
import { count, exactPercent, figures, numbered, percent, plural } from "../../ui/format";
import type { StepFrame } from "../../schema";
import { SAMPLER_VIEW, type SamplerView } from "../../schema/sampler";
import type { WayView } from "../../schema/block";
import { WAY_VIEW } from "../../schema/block";
import { card, frame, run } from "../../visit/store";
import { quoted } from "../../ui/text";
import * as flight from "./flight";
import { Told } from "../../ui/Stat";

/** The column of the cache, a row for each layer. */
export function Layers() {
  const model = card.value;
  const { layer } = flight.cell.value;
  return (
    <ol class="way-rows">
      {Array.from({ length: model?.layers ?? 0 }, (_, i) => (
        <li key={i}>
          <button
            type="button"
            aria-current={i === layer + 1 ? "true" : undefined}
            onClick={() => flight.enter(flight.reader.value, i)}
          >
            <span>layer {i}</span>
            <i class="half k">K</i>
            <i class="half v">V</i>
          </button>
        </li>
      ))}
    </ol>
  );
}

const textOf = (position: number): string => run.value?.called(position) ?? "";

/** The positions that are read most, with their scores, and with the weights that the softmax makes of these. */
export function Reads({ view, weights }: { view: WayView; weights: boolean }) {
  const sizes = view.reads.map(({ score, weight }) => (weights ? weight : Math.abs(score)));
  const most = Math.max(...sizes, 1e-9);
  const read = flight.block.value?.context ?? view.reader + 1;
  const others = read - view.reads.length;
  const held = 1 - view.reads.reduce((sum, { weight }) => sum + weight, 0);
  const table = useRef<HTMLTableElement>(null);
  useEffect(() => table.current?.querySelector(".now")?.scrollIntoView({ block: "nearest" }), [view]);
  return (
    <table class="way-reads" ref={table}>
      <thead>
        <tr>
          <th scope="col">position, token</th>
          <th scope="col">score</th>
          <th scope="col" colSpan={2} title={WAY_VIEW.weight?.meaning}>
            {weights ? "weight = e^score / Σ e^score" : ""}
          </th>
        </tr>
      </thead>
      <tbody>
        {view.reads.map(({ position, score, weight }, i) => (
          <tr key={position} class={position === view.position ? "now" : ""}>
            <th scope="row">
              <small>{numbered(position)}</small> {textOf(position)}
            </th>
            <td data-score={score}>{figures(score)}</td>
            <td class="way-bar">
              <i class={!weights && score < 0 ? "below" : ""} style={{ width: `${(100 * (sizes[i] ?? 0)) / most}%` }} />
            </td>
            {weights ? <td data-weight={weight}>{exactPercent(weight)}</td> : <td />}
          </tr>
        ))}
      </tbody>
      <tfoot>
        <tr>
          <th scope="row" colSpan={3} data-others={others}>
            {others > 0
              ? `${view.reads.length} of ${read} are shown: the highest, and this token; the other ${others}`
              : `all ${read} are shown`}
            {others > 0 && (weights ? " hold together" : " are read too")}
          </th>
          <td>{weights && others > 0 ? exactPercent(Math.max(0, held)) : ""}</td>
        </tr>
        {!weights && (
          <tr class="masked">
            <th scope="row" colSpan={4}>
              {view.reader + 1 > read && `${plural(view.reader + 1 - read, "token")} before the window: −∞. `}
              {(frame.value?.length ?? 1) > 1
                ? "To the tokens before it, what comes after them: score −∞, so weight 0"
                : "No later token exists yet. Where one does, its score is −∞, so its weight is 0"}
            </th>
          </tr>
        )}
      </tfoot>
    </table>
  );
}

/** The most probable tokens of the step, and the one that was drawn. */
export function Candidates({ step }: { step: StepFrame }) {
  const shown = step.candidates.slice(0, 10).map(({ token, logprob }) => ({ token, logprob, p: Math.exp(logprob) }));
  return (
    <table class="way-reads">
      <thead>
        <tr>
          <th scope="col">token</th>
          <th scope="col" title="the logit, less the logarithm of the sum of e^logit over all tokens">
            log p
          </th>
          <th scope="col" colSpan={2}>
            probability
          </th>
        </tr>
      </thead>
      <tbody>
        {shown.map(({ token, logprob, p }) => (
          <tr key={token} class={token === step.token ? "now" : ""}>
            <th scope="row">{quoted(run.value?.named(token).text ?? "")}</th>
            <td data-logprob={logprob}>{figures(logprob)}</td>
            <td class="way-bar">
              <i style={{ width: `${100 * p}%` }} />
            </td>
            <td data-p={p}>{percent(p)}</td>
          </tr>
        ))}
      </tbody>
      <tfoot>
        <tr>
          <th scope="row" colSpan={3}>
            the other {count((card.value?.vocab_size ?? 0) - shown.length)}
          </th>
          <td>{percent(Math.max(0, 1 - shown.reduce((sum, { p }) => sum + p, 0)))}</td>
        </tr>
      </tfoot>
    </table>
  );
}

const UNIFORM = { ...SAMPLER_VIEW.uniform!, unit: "share" };

/** The settings that left tokens out. */
function cuts(view: SamplerView): string {
  const each = [
    [view.after_top_k < view.vocab, `top-k ${view.top_k}`],
    [view.after_top_p < view.after_top_k, `top-p ${view.top_p}`],
    [view.kept < view.after_top_p, `min-p ${view.min_p}`],
  ] as const;
  const cut = each.flatMap(([on, name]) => (on ? [name] : []));
  return cut.length === 0 ? "The settings leave" : `The settings (${cut.join(", ")}) leave`;
}

/** The line from 0 to 1, of which each token has a part as wide as its probability; where the random number falls. */
export function Draw({ step, view }: { step: StepFrame; view: SamplerView | null }) {
  if (view === null || view.uniform === null) return <Candidates step={step} />;
  const shown = view.top.filter(({ sampled }) => sampled > 0);
  return (
    <div class="way-draw">
      <div class="way-line" role="img" aria-label="Each token's part of the line from 0 to 1">
        {shown.map(({ token, sampled, low }) => (
          <i
            key={token.id}
            class={token.id === view.drawn ? "now" : ""}
            title={`${quoted(token.text)}: ${percent(sampled)}`}
            data-low={low}
            data-sampled={sampled}
            style={{ left: `${100 * low}%`, width: `${100 * sampled}%` }}
          >
            {sampled > 0.06 && <span>{verbatim(token.text.trim() || "␣")}</span>}
          </i>
        ))}
        <b class="way-u" data-u={view.uniform} style={{ left: `${100 * view.uniform}%` }} aria-hidden="true" />
      </div>
      <dl class="way-sums">
        <dt>draw u</dt>
        <dd>
          <Told name="way_uniform" value={view.uniform} about={UNIFORM} />
        </dd>
        <dt>temperature</dt>
        <dd>{figures(view.temperature)}</dd>
        <dt>drawn</dt>
        <dd>{quoted(view.drawn_card?.text ?? "")}</dd>
      </dl>
      <p class="way-formula">
        {shown.length < view.kept
          ? `The ${shown.length} most probable of ${view.kept} are shown, in the order of their ids.`
          : `${cuts(view)} ${plural(view.kept, "token")} to draw from, in the order of ${view.kept === 1 ? "its id" : "their ids"}.`}
      </p>
    </div>
  );
}
