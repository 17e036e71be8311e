// The page pool: which pages are free, cached or in use, by whom and how full; and a batch of prompts beside the run, so
// that pages of several sequences, and pages that they share, can be seen. The engine tells all of it between two steps.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { call, post } from "../visit/api";
import { bytes, count, joined, numbered, plural } from "../ui/format";
import { frame, run, site } from "../visit/store";
import {
  POOL_GROUP,
  type BatchCard,
  type PoolCard,
  type PoolGroup,
  type PoolPage,
  type PoolSequence,
} from "../schema/pages";
import { Failed, Datum, asked, words } from "./common";
import { Lead } from "../ui/Lead";
import "../style/panels/pages.css";

const LEAST_CELLS = 192; // of the grid, at least; the pages behind the last one in use are free, and are told in words
const MOST_CELLS = 2048;
const EVERY = 400; // ms between two looks while a batch is open
const AT_REST = 2000; // without one: others use the pool, too
const BEGINNING =
  "Once upon a time, there was a little fox who lived in the forest with his mother and his father. Every morning he went out to look for a new friend to play with.";
const PROMPTS = ["One day, the fox", "At night, the fox", "Then he saw a"]
  .map((end) => `${BEGINNING} ${end}`)
  .join("\n");

const pool = asked<PoolCard>();
const batch = signal<BatchCard | null>(null);
const prompts = signal(PROMPTS);
const playing = signal(false);
const chosen = signal<number | null>(null); // the sequence whose pages are marked; at first the shown run's
const trouble = signal("");

export default function Pages() {
  return site.value === null ? <Live /> : <Recorded />;
}

/** The batch that a site has recorded, step by step: its pool is too small for it. */
interface Batch {
  prompts: string[];
  looks: PoolCard[];
}

const recording = asked<Batch>();
const at = signal(0);
const PLAYED = 350; // ms of a step of it

function Recorded() {
  useEffect(() => void (recording.value.peek() ?? recording.ask(() => call<Batch>("batch.json"))), []);
  const looks = recording.value.value?.looks ?? [];
  const going = playing.value && at.value < looks.length - 1;
  useEffect(() => {
    if (!going) return;
    const timer = setTimeout(() => (at.value += 1), PLAYED);
    return () => clearTimeout(timer);
  }, [going, at.value]);
  const card = looks[at.value];
  const group = card?.groups[0];
  const play = () => {
    if (at.value >= looks.length - 1) at.value = 0;
    playing.value = !going;
  };
  return (
    <>
      <Lead result={card ? `${result(card)}${waits(card)}` : ""}>
        Each square is a page of the KV cache: room for {card?.page_size ?? 16} tokens in all layers. The pool is too
        small for three texts: the youngest gives its pages away, and goes on later.
      </Lead>
      <Failed of={recording} />
      {card && group && (
        <>
          <div class="panel-form">
            <button type="button" class="panel-go" onClick={play}>
              {going ? "Pause the batch" : "Play the batch"}
            </button>
            <label class="wide">
              step {count(at.value)} of {count(looks.length - 1)}
              <input
                type="range"
                aria-label="step of the batch"
                min={0}
                max={looks.length - 1}
                value={at.value}
                onInput={(event) => {
                  playing.value = false;
                  at.value = Number(event.currentTarget.value);
                }}
              />
            </label>
          </div>
          <Group group={group} card={card} only />
          <Sequences card={card} />
        </>
      )}
    </>
  );
}

/** Which texts had to give their pages away, and wait for others. */
function waits({ sequences }: PoolCard): string {
  const all = sequences.filter(({ state, preemptions }) => preemptions > 0 && state === "waiting");
  if (all.length === 0) return "";
  return ` ${all.map(letter).join(" and ")} ${all.length === 1 ? "waits: its" : "wait: their"} pages were taken for older texts.`;
}

function Live() {
  const id = live();
  const step = frame.value?.step ?? -1;
  const open = beside();
  useEffect(() => {
    const timer = setTimeout(() => void look(id, open), 60);
    return () => clearTimeout(timer);
  }, [id, step, open]);
  useEffect(() => {
    const again = open === null ? () => look(id, null) : () => turn(id, open);
    const timer = setInterval(() => void again(), open === null ? AT_REST : EVERY);
    return () => clearInterval(timer);
  }, [id, open]);
  useEffect(() => () => void end(), []); // the server ends a batch, too, that no page asks about
  const found = pool.value.value;
  return (
    <>
      <Lead result={found ? result(found) : ""}>
        Each square is a page of the KV cache: room for {found?.page_size ?? 16} tokens in all layers. Start the prompts
        below: texts with the same beginning share its pages.
      </Lead>
      <Form />
      <Failed of={pool} />
      {found?.groups.map((group, i) => (
        <Group key={i} group={group} card={found} only={found.groups.length === 1} />
      ))}
      {found && <Sequences card={found} />}
    </>
  );
}

function result({ groups }: PoolCard): string {
  const sum = (of: (group: PoolGroup) => number) => groups.reduce((all, group) => all + of(group), 0);
  const shared = sum((group) => group.shared);
  const saved = joined(bytes(sum((group) => group.saved_bytes)));
  const used = `${count(sum((group) => group.used))} of ${plural(
    sum((group) => group.pages),
    "page",
  )} are in use`;
  if (shared === 0) return `${used}; no two texts share one.`;
  return `${used}; texts share ${count(shared)} of them, which saves ${saved}.`;
}

function live(): string | null {
  const current = run.value;
  return current?.origin === "live" ? current.id.value : null;
}

const beside = (): string | null => batch.value?.batch ?? null;

const look = (id: string | null, open: string | null): Promise<void> =>
  pool.ask(() => {
    const query = new URLSearchParams();
    if (id !== null) query.set("run", id);
    if (open !== null) query.set("batch", open);
    return call<PoolCard>(`pages?${query}`);
  });

async function turn(id: string | null, open: string): Promise<void> {
  const mine = pool.value.value?.sequences.filter(({ whose }) => whose === "batch") ?? [];
  if (playing.value && mine.length > 0 && mine.every(({ state }) => state === "finished")) playing.value = false;
  if (playing.value) await write(1);
  await look(id, open);
}

async function start(): Promise<void> {
  trouble.value = "";
  const lines = prompts.value.split("\n").filter((line) => line.trim() !== "");
  try {
    void end();
    batch.value = await call<BatchCard>("batches", post({ prompts: lines, max_tokens: 64 }));
    await write(1);
    playing.value = true;
  } catch (error) {
    trouble.value = words(error);
  }
}

async function write(tokens: number): Promise<void> {
  if (batch.value === null) return;
  try {
    await call(`batches/${batch.value.batch}/write`, post({ tokens }));
  } catch (error) {
    batch.value = null;
    trouble.value = words(error);
  }
}

async function end(): Promise<void> {
  const open = batch.value;
  playing.value = false;
  batch.value = null;
  if (open === null) return;
  await call(`batches/${open.batch}`, { method: "DELETE", keepalive: true }).catch(() => undefined);
  await look(live(), beside()); // its pages are free only now
}

function Form() {
  const open = batch.value !== null;
  const mine = pool.value.value?.sequences.filter(({ whose }) => whose === "batch") ?? [];
  const done = mine.length > 0 && mine.every(({ state }) => state === "finished");
  return (
    <form
      class="panel-form"
      onSubmit={(event) => {
        event.preventDefault();
        void start();
      }}
    >
      {!open && (
        <label class="wide">
          Prompts beside the run, one a line, 6 at most; each writes up to 64 tokens
          <textarea rows={12} value={prompts.value} onInput={(event) => (prompts.value = event.currentTarget.value)} />
        </label>
      )}
      {!open && (
        <button type="submit" class="panel-go" disabled={prompts.value.trim() === ""}>
          Start the batch
        </button>
      )}
      {open && (
        <>
          <button type="button" disabled={done} onClick={() => (playing.value = !playing.value)}>
            {playing.value ? "Pause the batch" : "Let it write"}
          </button>
          <button type="button" disabled={playing.value || done} onClick={() => void write(1)}>
            One token each
          </button>
          <button type="button" onClick={end}>
            End the batch
          </button>
        </>
      )}
      {trouble.value !== "" && (
        <p class="panel-error" role="alert">
          {trouble.value}
        </p>
      )}
    </form>
  );
}

const letter = (sequence: PoolSequence | undefined): string =>
  sequence === undefined || sequence.whose === "other"
    ? "·"
    : sequence.whose === "run"
      ? "R"
      : String.fromCharCode(65 + sequence.place);

const who = (sequence: PoolSequence): string =>
  sequence.whose === "run"
    ? "the shown run"
    : sequence.whose === "batch"
      ? `prompt ${letter(sequence)}`
      : "another text";

function Group({ group, card, only }: { group: PoolGroup; card: PoolCard; only: boolean }) {
  const layers = `layers ${group.layers[0]} to ${group.layers.at(-1)}`;
  const title = only ? "The pool" : `The pool of ${group.layers.length === 1 ? `layer ${group.layers[0]}` : layers}`;
  const window = group.window === null ? "" : `, a window of ${plural(group.window, "token")}`;
  const numbers = ["used", "shared", "cached", "free", "pages", "page_bytes", "saved_bytes"] as const;
  return (
    <>
      <h2>
        {title}
        {window}
      </h2>
      <Legend />
      <Grid group={group} card={card} />
      <dl class="panel-figures">
        {numbers.map((field) => (
          <Datum key={field} of={group} table={POOL_GROUP} field={field} {...(only ? { name: `pool_${field}` } : {})} />
        ))}
      </dl>
    </>
  );
}

function Legend() {
  return (
    <ul class="panel-legend" aria-label="Legend">
      <li>
        <span class="pool-page mine" aria-hidden="true">
          R
        </span>
        shown run
      </li>
      <li>
        <span class="pool-page used" aria-hidden="true" />
        in use
      </li>
      <li>
        <span class="pool-page used" aria-hidden="true">
          ·
        </span>
        another run or client
      </li>
      <li>
        <span class="pool-page shared" aria-hidden="true" />
        shared
      </li>
      <li>
        <span class="pool-page cached" aria-hidden="true" />
        cached
      </li>
      <li>
        <span class="pool-page" aria-hidden="true" />
        free
      </li>
    </ul>
  );
}

function Grid({ group, card }: { group: PoolGroup; card: PoolCard }) {
  const last = group.listed.at(-1)?.page ?? -1;
  const size = Math.min(group.pages, MOST_CELLS, Math.max(LEAST_CELLS, last + 1));
  const listed = new Map(group.listed.map((page) => [page.page, page]));
  const words = `${count(group.used)} of ${plural(group.pages, "page")} in use, ${group.shared} shared, ${group.cached} cached`;
  return (
    <>
      <div class="pool-grid" role="img" aria-label={words}>
        {Array.from({ length: size }, (_, number) => (
          <Cell key={number} number={number} page={listed.get(number)} card={card} />
        ))}
      </div>
      {group.pages > size && (
        <p class="panel-note">
          and {count(group.pages - size)} pages more{last < size ? ", all of them free" : ""}
        </p>
      )}
      {group.left_out > 0 && <p class="panel-note">{count(group.left_out)} pages in use or cached are not drawn.</p>}
    </>
  );
}

function Cell({ number, page, card }: { number: number; page: PoolPage | undefined; card: PoolCard }) {
  if (page === undefined) return <span class="pool-page" title={`page ${number}: free`} />;
  const owners = page.owners.map((index) => card.sequences[index]);
  const kind = page.refcount === 0 ? "cached" : page.refcount > 1 ? "shared" : "used";
  const mine = owners.some((owner) => owner?.whose === "run");
  const marked = chosen.value !== null && page.owners.includes(chosen.value);
  const letters = owners.map(letter).join("");
  const names = owners.map((owner) => (owner ? who(owner) : "")).join(", ");
  const held = page.refcount === 0 ? "cached, in no table" : `refcount ${page.refcount}: ${names}`;
  return (
    <span
      class={`pool-page ${kind} ${mine ? "mine" : ""} ${marked ? "marked" : ""}`}
      style={{ "--fill": `${(100 * page.filled) / card.page_size}%` }}
      data-page={number}
      data-refcount={page.refcount}
      data-filled={page.filled}
      title={`page ${number}: ${page.filled} of ${card.page_size} slots filled${positionsOf(page, card)}; ${held}`}
    >
      <span>{letters.length > 2 ? page.refcount : letters}</span>
    </span>
  );
}

/** The positions of a sequence that a page holds. */
function positionsOf({ place, filled }: PoolPage, { page_size }: PoolCard): string {
  if (place === null || filled === 0) return "";
  return ` with positions ${numbered(place * page_size)} to ${count(place * page_size + filled)}`;
}

function Sequences({ card }: { card: PoolCard }) {
  if (card.sequences.length === 0) return <p class="panel-note">No sequence is in the engine.</p>;
  return (
    <>
      <h2>The texts that hold pages</h2>
      <div class="panel-scroll" tabIndex={0}>
        <table class="panel-table">
          <thead>
            <tr>
              <th scope="col">sequence</th>
              <th scope="col">state</th>
              <th scope="col">tokens</th>
              <th scope="col" title="tokens that were not computed, because their pages were found">
                prefix hit
              </th>
              <th scope="col">pages</th>
              <th scope="col" title="how often its pages were taken for others">
                taken
              </th>
            </tr>
          </thead>
          <tbody>
            {card.sequences.map(
              (sequence, index) =>
                sequence.whose !== "other" && <Sequence key={index} sequence={sequence} index={index} card={card} />,
            )}
            <Others card={card} />
          </tbody>
        </table>
      </div>
    </>
  );
}

/** Texts of other runs and clients, which are nobody's business: their sums alone. */
function Others({ card }: { card: PoolCard }) {
  const others = card.sequences.filter(({ whose }) => whose === "other");
  if (others.length === 0) return null;
  const sum = (of: (sequence: PoolSequence) => number) => count(others.reduce((total, one) => total + of(one), 0));
  return (
    <tr>
      <td>· {plural(others.length, "other text")}</td>
      <td />
      <td>{sum(({ tokens }) => tokens)}</td>
      <td>{sum(({ reused }) => reused)}</td>
      <td>{sum(({ pages }) => pages)}</td>
      <td>{sum(({ preemptions }) => preemptions)}</td>
    </tr>
  );
}

function Sequence({ sequence, index, card }: { sequence: PoolSequence; index: number; card: PoolCard }) {
  const on = chosen.value === null ? sequence.whose === "run" : chosen.value === index;
  const pages = card.groups[0]?.listed.filter(({ owners }) => owners.includes(index)) ?? [];
  const saved = sequence.reused > 0 ? `; ${plural(sequence.reused, "token")} not computed again` : "";
  return (
    <>
      <tr data-whose={sequence.whose} data-place={sequence.place}>
        <td>
          <button type="button" aria-pressed={on} onClick={() => (chosen.value = on ? -1 : index)}>
            {letter(sequence)} {who(sequence)}
          </button>
        </td>
        <td>{sequence.state}</td>
        <td>{count(sequence.tokens)}</td>
        <td data-reused={sequence.reused}>{count(sequence.reused)}</td>
        <td>{count(sequence.pages)}</td>
        <td>{count(sequence.preemptions)}</td>
      </tr>
      {on && (
        <tr>
          <td colSpan={6} class="pool-table">
            page table:{" "}
            {pages.length === 0
              ? "empty"
              : [...pages]
                  .sort((a, b) => (a.place ?? 0) - (b.place ?? 0))
                  .map((one) => `${one.page}${positionsOf(one, card)}${one.refcount > 1 ? " (shared)" : ""}`)
                  .join(", ")}
            {saved}
          </td>
        </tr>
      )}
      {sequence.whose === "batch" && (
        <tr>
          <td colSpan={6} class="pool-text">
            …{sequence.prompt.slice(-24)}
            <b translate={false}>{sequence.text}</b>
          </td>
        </tr>
      )}
    </>
  );
}
