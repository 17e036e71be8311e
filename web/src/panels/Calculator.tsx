// The calculator: memory and work of the loaded model, or of a known one, at any context, batch and formats. The planner
// derives the figures; a KV memory of that size is allocated to confirm its bytes.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call, post } from "../visit/api";
import { bytes, count, flop, joined, modelName, percent, plural, pointed } from "../ui/format";
import { model } from "../visit/store";
import { CALCULATOR_CARD, type CalculatorCard } from "../schema/calculator";
import { Lead } from "../ui/Lead";
import { Badge } from "../ui/Stat";
import { Choice, Datum, Failed, Whole, asked } from "./common";
import "../style/panels/calculator.css";

const PAUSE = 250; // ms without a change before the engine is asked
const KV = ["native", "float32", "bfloat16", "fp8", "int8", "int4"];
const WEIGHTS = ["loaded", "float32", "bfloat16", "int8", "int4"];

const found = asked<CalculatorCard>();
const chosen = signal("loaded");
const context = signal<number | null>(null); // null: the model's own
const batch = signal<number | null>(1);
const kv = signal("native");
const window_ = signal<number | null>(null);
const sinks = signal<number | null>(null);
const weights = signal("loaded");

const ask = (measure: boolean): Promise<void> =>
  found.ask(() =>
    call<CalculatorCard>(
      "calculate",
      post({
        model: chosen.value,
        context: context.value,
        batch: batch.value ?? 1,
        kv: kv.value,
        window: window_.value,
        sinks: sinks.value ?? 0,
        weights: weights.value,
        measure,
      }),
    ),
  );

const measuring = signal(false);

async function measure(): Promise<void> {
  measuring.value = true;
  await ask(true);
  measuring.value = false;
}

export default function Calculator() {
  const ready = model.value !== null;
  const wanted = [chosen.value, context.value, batch.value, kv.value, window_.value, sinks.value, weights.value];
  useEffect(() => {
    if (!ready) return;
    const timer = setTimeout(() => void ask(false), PAUSE);
    return () => clearTimeout(timer);
  }, [ready, ...wanted]);
  const card = found.value.value;
  return (
    <>
      <Lead result={card ? result(card) : ""}>
        The memory that a KV cache needs, and the most tokens per second that memory bandwidth allows. Change a number:
        the planner calculates, and the engine allocates a cache of that size to confirm it.
      </Lead>
      <div class="panel-form">
        <Choice
          name="model"
          value={chosen}
          options={["loaded", ...(card?.models ?? [])]}
          say={(name) => (name === "loaded" ? modelName(model.value?.name ?? "the loaded one") : name)}
        />
        <Whole name="context" value={context} least={1} placeholder={card ? String(card.model_context) : ""} />
        <Whole name="batch" value={batch} least={1} placeholder="1" />
        <Choice name="K and V as" value={kv} options={KV} />
        <Choice
          name="weights as"
          value={weights}
          options={WEIGHTS}
          say={(name) => (name === "loaded" ? "they are" : name)}
        />
        <Whole name="window" value={window_} least={1} placeholder="none" />
        <Whole name="sinks (first tokens kept)" value={sinks} least={0} placeholder="0" />
      </div>
      <Failed of={found} />
      {card && <Shown card={card} />}
    </>
  );
}

function result({ kv_total, weight_bytes, context, batch, exceeds_at }: CalculatorCard): string {
  const texts = batch === 1 ? `${count(context)} tokens` : `${count(batch)} texts of ${count(context)} tokens`;
  const share = `${percent(kv_total / weight_bytes)} of the weights' ${joined(bytes(weight_bytes))}`;
  const beyond = exceeds_at === null ? "" : `; from ${plural(exceeds_at, "token")} on they take more than the weights`;
  return `K and V of ${texts} take ${joined(bytes(kv_total))}, ${share}${beyond}.`;
}

function Shown({ card }: { card: CalculatorCard }) {
  const most = Math.max(card.weight_bytes, card.kv_total);
  const agrees = card.kv_allocated !== null && card.kv_allocated === card.kv_planned;
  return (
    <>
      <dl class="calc-bars">
        {(
          [
            ["weights", "weight_bytes", card.weight_bytes],
            ["K and V", "kv_total", card.kv_total],
          ] as const
        ).map(([name, field, value]) => (
          <div key={field} class={field === "kv_total" ? "kept" : ""}>
            <dt>{name}</dt>
            <span class="calc-bar" aria-hidden="true">
              <i style={{ width: `${(100 * value) / most}%` }} />
            </span>
            <dd>
              <Datum of={card} table={CALCULATOR_CARD} field={field} name={`calc_${field}`} label={false} />
            </dd>
          </div>
        ))}
      </dl>
      <p class="calc-formula">
        {card.layers} layers · {count(card.context)} tokens · {count(card.batch)} at once: K and V of a token are{" "}
        {joined(bytes(card.kv_per_token))}, of a sequence {joined(bytes(card.kv_per_sequence))}.
      </p>
      <h2>Memory</h2>
      <dl class="panel-figures">
        {(["kv_per_token", "kv_per_sequence", "kv_planned", "kv_allocated", "total_bytes", "exceeds_at"] as const).map(
          (field) => (
            <Datum key={field} of={card} table={CALCULATOR_CARD} field={field} name={`calc_${field}`} />
          ),
        )}
        {card.loaded_bytes !== null && (
          <Datum of={card} table={CALCULATOR_CARD} field="loaded_bytes" name="calc_loaded_bytes" />
        )}
      </dl>
      <p class={agrees ? "calc-confirmed" : "panel-note"}>
        {card.kv_allocated === null
          ? `Not allocated: ${card.refused}.`
          : agrees
            ? "A cache of this size was allocated and measured: it has exactly the planned bytes."
            : "The allocated cache does not have the planned bytes."}
      </p>
      <h2>A decode step at the full context</h2>
      <p class="calc-formula">
        <span data-stat="calc_base_flops" data-value={card.base_flops} data-src="derived">
          {count(card.base_flops)}
        </span>{" "}
        +{" "}
        <span data-stat="calc_slope_flops" data-value={card.slope_flops} data-src="derived">
          {count(card.slope_flops)}
        </span>{" "}
        t FLOP for a token at t tokens
        <Badge source="derived" meaning="2 (P_b + P_lm) + A(t), before a window is full" />
      </p>
      <dl class="panel-figures">
        {(["decode_flops", "decode_bytes"] as const).map((field) => (
          <Datum key={field} of={card} table={CALCULATOR_CARD} field={field} name={`calc_${field}`} />
        ))}
        <div>
          <dt title={CALCULATOR_CARD["bandwidth"]?.meaning}>memory bandwidth</dt>
          <dd>
            <span class="value">
              {card.bandwidth === null ? "–" : `${pointed((card.bandwidth / 1e9).toFixed(1))} GB/s`}
            </span>
            <Badge source="measured" meaning={CALCULATOR_CARD["bandwidth"]?.meaning ?? ""} />
          </dd>
        </div>
        <Datum of={card} table={CALCULATOR_CARD} field="tokens_per_s" name="calc_tokens_per_s" />
      </dl>
      {card.bandwidth === null ? (
        <button type="button" disabled={found.busy.value} onClick={() => void measure()}>
          {measuring.value ? "Measuring…" : "Measure this machine's memory bandwidth"}
        </button>
      ) : (
        <p class="panel-note">
          Each step reads all weights once and K and V of each sequence: {joined(bytes(card.decode_bytes))} for{" "}
          {joined(flop(card.decode_flops))}. The bound holds beyond the processor's caches.
        </p>
      )}
    </>
  );
}
