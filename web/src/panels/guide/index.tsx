// The guide: scenes in a column beside the stage. The one in the middle of the view is on: the stage goes to its place, and
// its question waits for a guess, which the engine then checks. By scrolling, by Next, or by Page down.

import { signal, useSignal } from "@preact/signals";
import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import * as actions from "../../visit/actions";
import { count, figures, numberOf, sentence } from "../../ui/format";
import type { Fact } from "../../schema/learn";
import { panel } from "../../visit/store";
import * as learn from "../learn/server";
import { at, type Guess, guesses } from "./guesses";
import { Room, saveProgress } from "./Room";
import { type Scene, SCENES, seen, type Seen } from "./script";
import { release } from "./stagehand";
import { type Takeaway, takeaways } from "./takeaways";
import "../../style/panels/guide.css";

const places = signal<ReadonlyMap<string, Seen>>(new Map()); // what the stage showed at a scene
const trouble = signal("");
const busy = signal(false);
let gone = new AbortController();
let turned = false; // by Next or a key, and not by scrolling

const PAUSE = 150; // ms that a scene must be in view

/** Lets the stage go on; another call ends it. */
async function act(work: (gone: AbortSignal) => Promise<void>): Promise<void> {
  gone.abort();
  const own = (gone = new AbortController());
  trouble.value = "";
  busy.value = true;
  try {
    await work(own.signal);
  } catch (error) {
    if (gone === own && !own.signal.aborted) trouble.value = sentence(String((error as Error).message ?? error));
  } finally {
    if (gone === own) busy.value = false;
  }
}

const enter = (scene: Scene): Promise<void> =>
  act(async (stop) => {
    await scene.place(stop);
    if (scene.camera) actions.setCamera(scene.camera);
    const now = seen();
    if (now !== null && !guesses.value.has(scene.id)) places.value = new Map([...places.value, [scene.id, now]]);
  });

const check = (scene: Scene, given: number | string | null): Promise<void> =>
  act(async (stop) => {
    const before = places.value.get(scene.id);
    if (before === undefined || scene.find === undefined) return;
    const found = await scene.find(before, stop);
    const { right } = found;
    const ok =
      typeof given === "number" && typeof right === "number"
        ? Math.abs(given - right) <= (scene.near ?? 0) * right
        : given === right;
    guesses.value = new Map([...guesses.value, [scene.id, { ...found, given, ok }]]);
  });

export default function Guide() {
  const column = useRef<HTMLDivElement>(null);
  const now = at.value;
  useEffect(() => {
    if (turned) focus(column, now);
    turned = false;
    const timer = setTimeout(() => void enter(SCENES[now] as Scene), PAUSE);
    return () => clearTimeout(timer);
  }, [now]);
  useEffect(() => {
    column.current?.children[at.value]?.scrollIntoView({ block: "start" });
    focus(column, at.value);
    const watch = new IntersectionObserver(
      (entries) => {
        const index = entries.find((one) => one.isIntersecting)?.target.getAttribute("data-index");
        if (index) at.value = Number(index);
      },
      { root: column.current, rootMargin: "-50% 0px" },
    );
    for (const one of column.current?.children ?? []) watch.observe(one);
    const onKey = (event: KeyboardEvent) => {
      const by = { PageDown: 1, PageUp: -1 }[event.key];
      if (by === undefined || event.defaultPrevented) return;
      event.preventDefault();
      turn(column, at.value + by);
    };
    addEventListener("keydown", onKey);
    return () => {
      watch.disconnect();
      removeEventListener("keydown", onKey);
      gone.abort();
      release();
    };
  }, []);
  return (
    <div class="guide" ref={column}>
      {SCENES.map((scene, index) => (
        <section
          key={scene.id}
          class="guide-scene"
          data-scene={scene.id}
          data-index={index}
          aria-labelledby={`guide-${scene.id}`}
          tabIndex={-1}
          data-veil={index === now && scene.veil && !guesses.value.has(scene.id) ? "" : undefined}
          inert={index !== now}
        >
          <p class="guide-place">
            {index + 1} of {SCENES.length}
          </p>
          <h3 id={`guide-${scene.id}`}>{scene.title}</h3>
          <p class="guide-words">{scene.words}</p>
          {scene.ask ? <Question of={scene} on={index === now} /> : <End on={index === now} />}
          {index === now && <Room scene={scene.id} go={(to) => turn(column, to)} />}
          {index === now && trouble.value !== "" && (
            <p class="guide-verdict wrong" role="alert">
              {trouble.value}{" "}
              <button type="button" onClick={() => void enter(scene)}>
                Try again
              </button>
            </p>
          )}
          <div class="guide-turns">
            <button type="button" disabled={index === 0} onClick={() => turn(column, index - 1)} title="Page up">
              ← Back
            </button>
            {index < SCENES.length - 1 && (
              <button
                type="button"
                class={guesses.value.has(scene.id) ? "bright guide-next" : "guide-next"}
                onClick={() => turn(column, index + 1)}
                title="Page down"
              >
                Next →
              </button>
            )}
          </div>
        </section>
      ))}
    </div>
  );
}

function focus(column: RefObject<HTMLDivElement | null>, index: number): void {
  const scene = column.current?.children[index];
  if (scene instanceof HTMLElement) scene.focus({ preventScroll: true });
}

/** Goes to a scene; the keyboard goes along, once the others are shut to it. */
function turn(column: RefObject<HTMLDivElement | null>, index: number): void {
  const scene = column.current?.children[index];
  if (!(scene instanceof HTMLElement)) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  turned = true;
  at.value = index;
  scene.scrollIntoView({ block: "start", behavior: still ? "instant" : "smooth" });
}

function Question({ of, on }: { of: Scene; on: boolean }) {
  const given = useSignal("");
  const before = places.value.get(of.id);
  const guess = guesses.value.get(of.id);
  if (before === undefined) return <p class="guide-question wait">{on ? "The engine comes to this step …" : ""}</p>;
  const id = `guide-${of.id}-guess`;
  const submit = (event: Event) => {
    event.preventDefault();
    if (busy.value) return;
    const text = given.value.trim();
    const number = numberOf(text);
    if (of.options === undefined && !Number.isFinite(number))
      trouble.value = `“${text}” is no number; write one such as 42.`;
    else void check(of, text === "" ? null : of.options ? text : number);
  };
  return (
    <>
      <form class="guide-question" onSubmit={submit}>
        <label for={id}>{of.ask?.(before)}</label>
        <div class="guide-answer">
          {of.options ? (
            <select id={id} value={given.value} onChange={(event) => (given.value = event.currentTarget.value)}>
              <option value="">your guess</option>
              {of.options.map((option) => (
                <option key={option} value={option}>
                  {option}
                </option>
              ))}
            </select>
          ) : (
            <input
              id={id}
              type="text"
              inputMode="decimal"
              autocomplete="off"
              placeholder="your guess"
              value={given.value}
              onInput={(event) => (given.value = event.currentTarget.value)}
            />
          )}
          <button type="submit" class={guess === undefined ? "bright" : ""} aria-disabled={busy.value}>
            {given.value === "" ? "Show me" : "Let the engine check"}
          </button>
        </div>
      </form>
      <div role="status">{guess && <Verdict of={guess} />}</div>
    </>
  );
}

const said = (value: number | string): string =>
  typeof value === "string" ? value : Number.isInteger(value) ? count(value) : figures(value);

function Verdict({ of: { given, right, ok, because } }: { of: Guess }) {
  const place = useRef<HTMLParagraphElement>(null);
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }), []);
  const engine = said(right);
  const head = given === null ? `It is ${engine}.` : ok ? `Right: ${engine}.` : `Not ${said(given)}: it is ${engine}.`;
  return (
    <p
      ref={place}
      class={`guide-verdict ${ok ? "right" : given === null ? "" : "wrong"}`}
      data-given={given}
      data-ok={ok}
      data-right={right}
    >
      <b>{head}</b> {because}
    </p>
  );
}

const FIRST = 3; // takeaways that are in view

const Takeaways = ({ of }: { of: readonly Takeaway[] }) => (
  <ul>
    {of.map(({ said, right, is, formula, here }) => (
      <li key={said} class={right ? "right" : "wrong"}>
        <q>{said}</q>
        <p>
          <b>{right ? "So it is." : "Not so."}</b> {is}
        </p>
        {formula && <p class="guide-formula">{formula}</p>}
        <p class="guide-here">{here}</p>
      </li>
    ))}
  </ul>
);

/** The guesses in a number, the articles' sentences with what was measured, and where to go on. */
function End({ on }: { on: boolean }) {
  const facts = useSignal<readonly Fact[]>([]);
  useEffect(() => {
    if (!on) return;
    learn.lesson().then(
      (found) => (facts.value = found.facts.flatMap((one) => one.facts)),
      () => undefined, // the others stand without it
    );
  }, [on]);
  const made = [...guesses.value.values()].filter(({ given }) => given !== null);
  const text = places.value.get("end")?.run;
  const all = on && text?.ended ? takeaways(text, facts.value) : [];
  return (
    <>
      <p class="guide-score" role="status">
        {made.length > 0 && `${made.filter(({ ok }) => ok).length} of your ${made.length} guesses were right.`}
      </p>
      <div class="guide-takeaways">
        <Takeaways of={all.slice(0, FIRST)} />
        {all.length > FIRST && (
          <details>
            <summary>{count(all.length - FIRST)} more, with formulas</summary>
            <Takeaways of={all.slice(FIRST)} />
          </details>
        )}
      </div>
      <p class="guide-on">
        <button type="button" class="bright" onClick={() => (panel.value = "learn")}>
          Solve challenges
        </button>
        <button type="button" onClick={() => (panel.value = "code")}>
          See the code
        </button>
        <button type="button" onClick={() => (panel.value = null)}>
          Write your own
        </button>
        <button type="button" onClick={saveProgress}>
          Save my answers
        </button>
      </p>
    </>
  );
}
