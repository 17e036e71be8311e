// How the newest token was chosen: the likeliest candidates with what the model gave them (outline) and what the
// sampler left of it (fill), the one that was taken, and the random number that decided.

import { useSignal } from "@preact/signals";
import { count, figures, ordinal, percent } from "../ui/format";
import { fork } from "../run/branches";
import { written } from "../visit/clock";
import { asking, live, run, writtenFrame } from "../visit/store";
import { marked, quoted } from "../ui/text";
import type { Run } from "../run/run";
import type { Candidate, StepFrame } from "../schema";
import { Instrument } from "./Instruments";
import { Stat } from "../ui/Stat";

const LISTED = 8; // at first; the frame has twenty
const WHOLE = 0.995; // of the sampler's mass that must be listed for the draw to be drawn

export function NextToken() {
  const step = writtenFrame.value;
  const current = run.value;
  const token = step?.token ?? null;
  return (
    <Instrument
      name="Next token"
      id="next"
      hint={written.value ? "probabilities, and the draw" : "how the last one was chosen"}
    >
      {step === null || current === null || token === null ? (
        <p class="sentence">
          {step === null ? "No step yet." : "This step read a part of the prompt; nothing was chosen."}
        </p>
      ) : (
        <>
          <p class="panel-result">{result(step, current, token)}</p>
          <Bars step={step} token={token} />
          <Draw step={step} />
        </>
      )}
      <dl class="pairs">
        <div>
          <dt>entropy</dt>
          <dd>
            <Stat name="entropy" of={step} />
          </dd>
        </div>
        <div>
          <dt>rank</dt>
          <dd>
            <Stat name="rank" of={step} />
          </dd>
        </div>
        <div>
          <dt>log p</dt>
          <dd>
            <Stat name="logprob" of={step} />
          </dd>
        </div>
        <div>
          <dt>p sampler</dt>
          <dd>
            <Stat name="sampled" of={step} />
          </dd>
        </div>
        <div>
          <dt>draw u</dt>
          <dd>
            {step && step.uniform === null && token !== null ? <span class="none">greedy: none </span> : null}
            <Stat name="uniform" of={step} />
          </dd>
        </div>
        <div>
          <dt>temperature</dt>
          <dd>{current ? figures(current.card.temperature) : "–"}</dd>
        </div>
      </dl>
    </Instrument>
  );
}

/** Which token was chosen, how, and what the model thought of it. */
function result(step: StepFrame, run: Run, token: number): string {
  const how = run.card.temperature === 0 ? "has the highest logit" : "was drawn";
  const rank = step.rank === 0 ? "more than any other" : `the ${ordinal((step.rank ?? 0) + 1)} most`;
  return `${quoted(run.named(token).text)} ${how}: the model gave it ${percent(Math.exp(step.logprob ?? 0))}, ${rank} of ${count(run.model.vocab_size)} tokens.`;
}

function Bars({ step, token }: { step: StepFrame; token: number }) {
  const all = useSignal(false);
  const room = all.value ? step.candidates.length : LISTED;
  const shown = step.candidates.slice(0, room);
  const chosen = step.candidates.find((candidate) => candidate.token === token);
  if (!shown.some((candidate) => candidate.token === token))
    shown.splice(room - 1, 1, chosen ?? { token, logprob: step.logprob ?? -Infinity, sampled: step.sampled ?? 0 });
  return (
    <>
      <p class="bars-key" aria-hidden="true">
        <span class="swatch outline" /> the model <span class="swatch fill" /> the sampler
        <span class="bars-whole">full width 100 %</span>
      </p>
      <ol class="bars">
        {shown.map((candidate) => (
          <Bar key={candidate.token} step={step.step} candidate={candidate} chosen={candidate.token === token} />
        ))}
      </ol>
      {step.candidates.length > LISTED && (
        <button type="button" class="bars-more" aria-expanded={all.value} onClick={() => (all.value = !all.value)}>
          {all.value ? `the first ${LISTED}` : `all ${step.candidates.length} candidates`}
        </button>
      )}
    </>
  );
}

interface BarProps {
  step: number;
  candidate: Candidate;
  chosen: boolean;
}

function Bar({ step, candidate, chosen }: BarProps) {
  const p = Math.exp(candidate.logprob);
  const text = run.value?.named(candidate.token).text ?? "";
  const cut = candidate.sampled === 0;
  const left = cut ? "cut by the sampler" : `sampler ${percent(candidate.sampled)}`;
  const words = `${quoted(text)}: model ${percent(p)}, ${left}${chosen ? ", chosen" : ""}`;
  return (
    <li
      class={`bar ${chosen ? "chosen" : ""} ${cut ? "cut" : ""}`}
      title={`${words}; id ${candidate.token}`}
      data-candidate={candidate.token}
      data-p={p}
      data-sampled={candidate.sampled}
    >
      <span class="sr">{words}</span>
      {live.value && !chosen && (
        <button
          type="button"
          class="bar-fork"
          disabled={asking.value}
          aria-label={`Continue with ${quoted(text)} instead, in a branch`}
          title={`${words}. Click: continue with this token instead, in a branch`}
          onClick={() => void fork(step, candidate.token)}
        />
      )}
      <span class="bar-mark" aria-hidden="true">
        {chosen ? "▸" : ""}
      </span>
      <span class="bar-name" aria-hidden="true">
        {marked(text)}
      </span>
      <span class="bar-track" aria-hidden="true">
        <span class="bar-fill" style={{ width: `${candidate.sampled * 100}%` }} />
        <span class="bar-outline" style={{ width: `${p * 100}%` }} />
      </span>
      <span class="bar-value of-model" aria-hidden="true">
        {percent(p)}
      </span>
      <span class="bar-value" aria-hidden="true">
        {cut ? "cut" : percent(candidate.sampled)}
      </span>
    </li>
  );
}

/** The draw: what the sampler left, laid end to end in the order of ids, and the random number that points into it. */
function Draw({ step }: { step: StepFrame }) {
  if (step.uniform === null) return null;
  const kept = step.candidates.filter((candidate) => candidate.sampled > 0).sort((a, b) => a.token - b.token);
  const mass = kept.reduce((sum, candidate) => sum + candidate.sampled, 0);
  if (mass < WHOLE) return null;
  return (
    <div
      class="draw"
      title="What the sampler left, laid end to end in the order of ids; the mark is the random number u"
    >
      <div class="draw-strip" aria-hidden="true">
        {kept.map((candidate) => (
          <span
            key={candidate.token}
            class={candidate.token === step.token ? "chosen" : ""}
            style={{ flexGrow: candidate.sampled / mass }}
          />
        ))}
      </div>
      <span class="draw-mark" aria-hidden="true" style={{ left: `${step.uniform * 100}%` }} />
    </div>
  );
}
