// The one number of the page: the cells of the shown step, of those that the other way of doing it takes. Two bars stand under it
// at all times, with the cache and without.

import { card, frame } from "../visit/store";
import { Figure, LayerTokens, Stat } from "../ui/Stat";

export function Work() {
  const step = frame.value;
  if (step === null) return null;
  const layers = card.value?.layers ?? 0;
  const all = step.start + step.length; // tokens of the text so far: what a step without the cache computes
  const least = step.length - step.recomputed; // those that none before it had computed
  const [cached, uncached] = step.cache ? [step.length, all] : [least, step.length];
  const times = uncached / Math.max(1, cached);
  return (
    <div class="work">
      <p class="saving">
        {"This step: "}
        <Stat name="layer_tokens" class="saving-number" bare />
        {step.cache && times > 1 && (
          <>
            {" of "}
            <Without value={layers * all} />
          </>
        )}
        {" cells"}
        {times > 1 ? (
          <>
            {!step.cache && (
              <>
                {", not "}
                <With value={layers * least} />
              </>
            )}
            {step.cache ? ", " : ": "}
            <Figure
              name="step_times"
              value={times}
              source="derived"
              unit="times"
              meaning="layer-tokens of the step without the cache / with it"
              class={step.cache ? "less" : "more"}
            />{" "}
            {step.cache ? "fewer" : "as many"}
          </>
        ) : (
          step.cache && ", no work saved yet"
        )}
      </p>
      <dl class="versus" aria-label="The work of this step">
        <dt>with cache</dt>
        <Bar role="kept" share={cached / Math.max(1, uncached)} done={step.cache} />
        <dd>
          {step.cache ? <Stat name="layer_tokens" /> : <With value={layers * least} />} cells{" "}
          <LayerTokens of={cached} layers={layers} />
        </dd>
        <dt>without</dt>
        <Bar role="recomputed" share={1} done={!step.cache} />
        <dd>
          {step.cache ? <Without value={layers * all} /> : <Stat name="layer_tokens" />} cells{" "}
          <LayerTokens of={uncached} layers={layers} />
        </dd>
      </dl>
    </div>
  );
}

/** `done`: whether this is what the step did; the other bar is what it would have taken. */
function Bar({ role, share, done }: { role: string; share: number; done: boolean }) {
  return (
    <dd class={`result-bar ${role} ${done ? "" : "not-done"}`} aria-hidden="true">
      <span style={{ width: `${share * 100}%` }} />
    </dd>
  );
}

const With = ({ value }: { value: number }) => (
  <Figure
    name="with_cache"
    value={value}
    source="derived"
    unit=""
    meaning="layers x (tokens of the step - those computed before)"
  />
);

const Without = ({ value }: { value: number }) => (
  <Figure name="without_cache" value={value} source="derived" unit="" meaning="layers x tokens of the text so far" />
);
