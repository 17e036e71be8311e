// The actions of a card on the stage: its buttons begin a run, make a step, switch the cache, move to a step, choose a head,
// and its figures belong to the step that is then shown.

import type { ComponentChildren } from "preact";
import * as actions from "../../visit/actions";
import * as nextRun from "../../run/next-run";
import { numbered } from "../../ui/format";
import { masses } from "../../run/answers/heads";
import * as player from "../../run/play/player";
import { select } from "../../run/answers/attention-row";
import type { StepFrame } from "../../schema";
import type { Fact } from "../../schema/learn";
import * as session from "../../visit/session";
import { alone, asking, cache, card, frame, head, last, layer, live, panel, run, totals } from "../../visit/store";
import { quoted } from "../../ui/text";
import { Total } from "../Instruments";
import { Figure, LayerTokens, Stat } from "../../ui/Stat";
import { Listings } from "../code";
import { usable } from "../usable";
import { Notebook as Lines, Typewriter } from "./Drawings";
import { Facts } from "./Facts";
import { Training } from "./Training";

interface Props {
  facts: readonly Fact[];
}

export const WIDGETS: Record<string, (props: Props) => ComponentChildren> = {
  loop: Loop,
  phases: Phases,
  qkv: Qkv,
  notebook: Notebook,
  savings: Savings,
  dial: Dial,
  smaller: Smaller,
  training: Training,
};

/** A run that can go on; where there is none, one is begun and held after `stop` steps. */
function ready(stop: number): boolean {
  const current = run.value;
  if (live.value && current !== null && !current.ended) return true;
  void session.start(stop);
  return false;
}

/** One step of the engine, at the end of what there is. */
function stepOn(by = 1): void {
  if (alone.value) return actions.step(by); // of the recording
  if (!ready(by - 1)) return;
  actions.end();
  actions.step(by);
}

function Drive({ does, children, pressed }: { does: () => void; children: ComponentChildren; pressed?: boolean }) {
  return (
    <button type="button" class="learn-drive" disabled={asking.value} aria-pressed={pressed} onClick={does}>
      {children}
    </button>
  );
}

function Row({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** A button for another panel, if this page has it. */
function Elsewhere({ id, children }: { id: string; children: ComponentChildren }) {
  if (!usable().some((other) => other.id === id)) return null;
  return (
    <button type="button" class="learn-drive" onClick={() => (panel.value = id)}>
      {children}
    </button>
  );
}

function Loop() {
  const step = frame.value;
  const current = run.value;
  const token = step?.token ?? null;
  return (
    <>
      <div class="learn-drives">
        <Drive does={() => stepOn()}>Write one token</Drive>
        <Drive does={() => stepOn(10)}>Write ten</Drive>
        <Drive does={() => void session.start(0)}>Begin again</Drive>
      </div>
      <Typewriter />
      <dl class="learn-facts">
        <Row name="the text so far">
          <Stat name="seq_len" />
        </Row>
        <Row name="written in this step">{current && token !== null ? quoted(current.named(token).text) : "–"}</Row>
        <Row name="its log p, by the model">
          <Stat name="logprob" />
        </Row>
        <Row name="time of this step">
          <Stat name="step_us" />
        </Row>
      </dl>
    </>
  );
}

const COLUMNS: readonly [keyof StepFrame, string, string][] = [
  ["length", "tokens through the layers", "tokens"],
  ["flops_derived", "FLOP", "FLOP"],
  ["weight_bytes", "weights read", "B"],
  ["step_us", "time", "us"],
];

function Phases() {
  const first = run.value?.frames[0] ?? null;
  const shown = frame.value;
  const one = shown !== null && shown.length === 1 ? shown : (run.value?.frames[last.value] ?? null);
  const decode = one !== null && one.length === 1 ? one : null;
  return (
    <>
      <div class="learn-drives">
        <Drive does={() => (first === null ? void session.start(0) : actions.first())}>Show prefill</Drive>
        <Drive does={() => (decode === null ? stepOn() : actions.end())}>Show a decode step</Drive>
        <Drive does={() => stepOn()}>Make another</Drive>
      </div>
      <table class="sums learn-sums">
        <thead>
          <tr>
            <td />
            <th scope="col">prefill</th>
            <th scope="col">decode{decode === null ? "" : `, step ${numbered(decode.step)}`}</th>
          </tr>
        </thead>
        <tbody>
          {COLUMNS.map(([name, label, unit]) => (
            <tr key={name}>
              <th scope="row">{label}</th>
              <td>
                <Of step={first} name={name} unit={unit} as={`prefill_${name}`} />
              </td>
              <td>
                <Of step={decode} name={name} unit={unit} as={`decode_${name}`} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

const SOURCES = { length: "counted", flops_derived: "derived", weight_bytes: "counted", step_us: "measured" } as const;

function Of({ step, name, unit, as }: { step: StepFrame | null; name: keyof StepFrame; unit: string; as: string }) {
  const value = step === null ? null : (step[name] as number | bigint);
  const source = SOURCES[name as keyof typeof SOURCES];
  return <Figure name={as} value={value} source={source} unit={unit} meaning="of that step, as its own figures say" />;
}

function Qkv({ facts }: Props) {
  return (
    <>
      <div class="learn-drives">
        <Drive does={() => stepOn()}>One step: watch the query ask</Drive>
        <Drive does={() => actions.changeHead(1)}>
          Next head (now layer {layer.value}, head {head.value})
        </Drive>
        <Drive does={() => actions.changeLayer(1)}>Next layer</Drive>
      </div>
      <Facts of={facts} prefix="qkv" />
      <dl class="learn-facts">
        <Row name="K and V written in this step">
          <Stat name="kv_written" />
        </Row>
        <Row name="K and V read in this step">
          <Stat name="kv_read" />
        </Row>
      </dl>
    </>
  );
}

function Notebook({ facts }: Props) {
  return (
    <>
      <div class="learn-drives">
        <Drive does={() => actions.setCamera("side")}>See the wall from the side</Drive>
        <Drive does={() => stepOn(10)}>Write ten tokens</Drive>
      </div>
      <Lines />
      <dl class="learn-facts">
        <Row name="tokens of the text">
          <Stat name="seq_len" />
        </Row>
        <Row name="K and V kept">
          <Stat name="kv_resident" />
        </Row>
        <Row name="pages that hold them">
          <Stat name="kv_allocated" />
        </Row>
      </dl>
      <Facts of={facts} prefix="notebook" />
    </>
  );
}

function Savings({ facts }: Props) {
  const sum = totals.value;
  const without = () => {
    actions.setCache(false);
    stepOn();
  };
  const back = () => {
    actions.setCache(true);
    stepOn();
  };
  return (
    <>
      <div class="learn-drives">
        <Drive does={without} pressed={!cache.value}>
          Switch the cache off, and make a step
        </Drive>
        <Drive does={back}>Switch it on, and make a step</Drive>
        <Elsewhere id="race">Race both ways</Elsewhere>
        <Elsewhere id="code">The engine’s own code</Elsewhere>
      </div>
      <Listings />
      <dl class="learn-facts">
        <Row name="work of this step">
          <Stat name="layer_tokens" />{" "}
          {frame.value && <LayerTokens of={frame.value.length} layers={card.value?.layers ?? 0} />}
        </Row>
        <Row name="computed again">
          <Stat name="recomputed" />
        </Row>
        <Row name="layer-tokens so far">
          <Total name="layer_tokens" value={sum?.layer_tokens} unit="" />
        </Row>
        <Row name="time of this step">
          <Stat name="step_us" />
        </Row>
      </dl>
      <Facts of={facts} prefix="savings" />
    </>
  );
}

const DIALS = [0, 0.7, 1.5] as const;

function Dial() {
  const begin = (temperature: number) => {
    nextRun.temperature.value = temperature;
    nextRun.seed.value = nextRun.seed.value ?? 1;
    void session.start();
  };
  return (
    <>
      <div class="learn-drives">
        {DIALS.map((temperature) => (
          <Drive
            key={temperature}
            does={() => begin(temperature)}
            pressed={run.value?.card.temperature === temperature && live.value}
          >
            {temperature === 0 ? "Greedy (T = 0)" : `T = ${temperature}`}
          </Drive>
        ))}
        <Drive does={() => stepOn()}>One step</Drive>
        <Elsewhere id="sampler">Other settings on the same logits</Elsewhere>
      </div>
      <dl class="learn-facts">
        <Row name="entropy of this step: 0 certain, 1 a coin">
          <Stat name="entropy" />
        </Row>
        <Row name="rank of the token that was drawn">
          <Stat name="rank" />
        </Row>
        <Row name="its probability after the sampler">
          <Stat name="sampled" />
        </Row>
        <Row name="the random number u">
          <Stat name="uniform" />
        </Row>
      </dl>
    </>
  );
}

/** The place of the largest value of a list by layer, then by head. */
function largest(values: readonly number[], heads: number): [number, number] {
  const at = values.indexOf(Math.max(...values));
  return [Math.floor(at / heads), at % heads];
}

function Smaller({ facts }: Props) {
  const found = masses.value;
  const heads = card.value?.heads ?? 1;
  const choose = (values: readonly number[] | undefined) => {
    if (values === undefined) return;
    player.pause();
    select(...largest(values, heads));
  };
  return (
    <>
      <div class="learn-drives">
        <Drive does={() => choose(found?.sink)}>The head with most weight on the first token</Drive>
        <Drive does={() => choose(found?.local)}>The head with most weight on the last eight</Drive>
        {found === null && <Drive does={() => stepOn()}>Make a step first</Drive>}
        <Elsewhere id="lab">Try formats and windows in the lab</Elsewhere>
        <Elsewhere id="pages">See the pages</Elsewhere>
      </div>
      <p class="learn-note">
        The stage shows layer {layer.value}, head {head.value}. A window would cut the beams to the left; sinks would
        keep the first.
      </p>
      <Facts of={facts} prefix="smaller" />
    </>
  );
}
