// The cache lab: the text of the shown run, scored again under another cache and under the full one. The engine computes
// both on the same weights; what differs is what it keeps of K and V.

import { signal } from "@preact/signals";
import { call, post } from "../visit/api";
import { joined, numbered, percent, plural, pointed as figure, shown as inUnit } from "../ui/format";
import { last, live, run } from "../visit/store";
import { marked, quoted } from "../ui/text";
import { LAB_CARD, type LabCard } from "../schema/lab";
import { Choice, Datum, Failed, Nothing, Whole, asked } from "./common";
import { tried } from "../stage/kept";
import { Lead } from "../ui/Lead";
import "../style/panels/lab.css";

const KV = ["native", "float32", "bfloat16", "fp8", "int8", "int4"];
const STRONG = 0.5; // nats of KL that are shaded fully

const found = asked<LabCard>();
const of = signal<{ run: string; ids: readonly string[] } | null>(null); // the text that was scored
const kv = signal("int4");
const window_ = signal<number | null>(null);
const sinks = signal<number | null>(null);
const pageSize = signal<number | null>(16);
const pointed = signal<number | null>(null);

function compare(): void {
  const current = run.value;
  if (current === null) return;
  const texts = current.tokens.map((token) => token.text);
  const body = {
    kv: kv.value,
    window: window_.value,
    sinks: sinks.value ?? 0,
    page_size: pageSize.value ?? 16,
  };
  void found.ask(async () => {
    const card = await call<LabCard>(`runs/${current.id.value}/lab`, { ...post(body), timeout: 120_000 });
    of.value = { run: current.id.value, ids: texts };
    tried.value = { run: current.id.value, lab: card }; // the wall shows what is left of it
    return card;
  });
}

export default function Lab() {
  const card = found.value.value;
  return (
    <>
      <Lead result={card ? result(card) : ""}>
        Choose a smaller KV cache, and see its effect: the model scores the text of this run with that cache, and with
        the full one.
      </Lead>
      {!live.value || last.value < 0 ? (
        <Nothing />
      ) : (
        <form
          class="panel-form"
          onSubmit={(event) => {
            event.preventDefault();
            compare();
          }}
        >
          <Choice name="K and V as" value={kv} options={KV} />
          <Whole name="window" value={window_} least={1} placeholder="none" />
          <Whole name="sinks (first tokens kept)" value={sinks} least={0} placeholder="0" />
          <Whole name="page size" value={pageSize} least={1} placeholder="16" />
          <button type="submit" class="panel-go" disabled={found.busy.value}>
            {found.busy.value ? "Comparing…" : "Compare"}
          </button>
        </form>
      )}
      <Failed of={found} />
      {card && <Shown card={card} />}
    </>
  );
}

function result(card: LabCard): string {
  const share = percent(card.kept_bytes / card.full_bytes);
  const changed = `${card.changed.length} of ${plural(card.positions, "first guess", "first guesses")} changed`;
  return `${share} of the full cache (${card.kv}): ${changed}, at a mean KL of ${joined(inUnit(card.mean_kl, "nat"))}.`;
}

function Shown({ card }: { card: LabCard }) {
  const share = card.kept_bytes / card.full_bytes;
  const words = of.value?.ids ?? [];
  return (
    <>
      <dl class="lab-bars">
        <div>
          <dt>full cache</dt>
          <span class="lab-bar" aria-hidden="true">
            <i style={{ width: "100%" }} />
          </span>
          <dd>
            <Datum of={card} table={LAB_CARD} field="full_bytes" name="lab_full_bytes" label={false} />
          </dd>
        </div>
        <div>
          <dt>this cache</dt>
          <span class="lab-bar" aria-hidden="true">
            <i style={{ width: `${share * 100}%` }} />
          </span>
          <dd>
            <Datum of={card} table={LAB_CARD} field="kept_bytes" name="lab_kept_bytes" label={false} />
          </dd>
        </div>
      </dl>
      <dl class="panel-figures">
        {(["page_bytes", "pages", "tokens", "same", "mean_kl", "max_kl", "mean_delta"] as const).map((field) => (
          <Datum key={field} of={card} table={LAB_CARD} field={field} name={`lab_${field}`} />
        ))}
      </dl>
      <h2>
        The text <span class="under">shaded by KL; underlined where the first guess is another word</span>
      </h2>
      <Words card={card} words={words} />
      <Changes card={card} />
    </>
  );
}

function Words({ card, words }: { card: LabCard; words: readonly string[] }) {
  const changed = new Map(card.changed.map((one) => [one.position, one]));
  return (
    <p class="lab-text">
      {words.slice(0, card.positions + card.first).map((word, position) => {
        const kl = card.kl[position - card.first] ?? 0;
        const other = changed.get(position);
        const says = other ? `; first guess ${quoted(other.lab.text)}, not ${quoted(other.full.text)}` : "";
        const title =
          position < card.first ? "the first token is not predicted" : `KL ${figure(kl.toFixed(4))} nat${says}`;
        return (
          <span
            key={position}
            class={`${other ? "changed" : ""} ${pointed.value === position ? "pointed" : ""}`}
            style={{ "--kl": `${Math.min(1, Math.sqrt(kl / STRONG)) * 100}%` }}
            data-kl={kl}
            title={title}
          >
            {word.replaceAll("\n", "⏎")}
          </span>
        );
      })}
    </p>
  );
}

const MOST = 24; // changes that are listed

function Changes({ card }: { card: LabCard }) {
  if (card.changed.length === 0)
    return (
      <p class="panel-note">
        The most probable token is the same at every token: greedy decoding would write the same text.
      </p>
    );
  return (
    <div class="panel-scroll" tabIndex={0}>
      <table class="panel-table lab-changes">
        <thead>
          <tr>
            <th scope="col">token</th>
            <th scope="col">first guess, full cache</th>
            <th scope="col">first guess, this cache</th>
            <th scope="col">KL, nat</th>
          </tr>
        </thead>
        <tbody>
          {card.changed.slice(0, MOST).map((one) => (
            <tr
              key={one.position}
              data-changed={one.position}
              onPointerEnter={() => (pointed.value = one.position)}
              onPointerLeave={() => (pointed.value = null)}
            >
              <td>{numbered(one.position)}</td>
              <td>{marked(one.full.text)}</td>
              <td>{marked(one.lab.text)}</td>
              <td>{figure((card.kl[one.position - card.first] ?? 0).toFixed(4))}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {card.changed.length > MOST && <p class="panel-note">and {card.changed.length - MOST} more</p>}
    </div>
  );
}
