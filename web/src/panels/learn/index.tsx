// The lesson: eight cards beside the live stage. Each says one thing in three levels, drives the stage, and has
// challenges that the engine checks.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { plural, sentence } from "../../ui/format";
import type { ChallengeCard, Lesson } from "../../schema/learn";
import { engineHere } from "../../visit/server";
import { alone, model } from "../../visit/store";
import { CARDS, LEVELS, type Card } from "./cards";
import { Challenge } from "./Challenge";
import { card, done, level, move, open, seen } from "./progress";
import * as server from "./server";
import { WIDGETS } from "./Widgets";
import "../../style/panels/learn.css";

export default function Learn() {
  const lesson = useSignal<Lesson | null>(null);
  const failure = useSignal("");
  const ready = model.value !== null;
  useEffect(() => {
    if (!ready) return;
    server.lesson().then(
      (found) => (lesson.value = found),
      (error: unknown) => (failure.value = sentence(error instanceof Error ? error.message : String(error))),
    );
  }, [ready]);
  const at = CARDS.findIndex(({ id }) => id === card.value);
  const current = CARDS[at] as Card;
  const top = useRef<HTMLDivElement>(null);
  const before = useRef(current.id);
  useEffect(() => {
    if (before.current !== current.id && top.current) {
      const row = document.querySelector(".panel-buttons")?.clientHeight ?? 0; // it stays where it is
      top.current.style.scrollMarginTop = `${row + 12}px`;
      top.current.scrollIntoView({ block: "start" });
    }
    before.current = current.id;
  }, [current.id]);
  useEffect(() => {
    const turn = (event: KeyboardEvent) => {
      const by = { PageDown: 1, PageUp: -1 }[event.key];
      if (by === undefined || event.defaultPrevented) return;
      event.preventDefault();
      move(by);
    };
    addEventListener("keydown", turn);
    return () => removeEventListener("keydown", turn);
  }, []);
  return (
    <div class="learn" ref={top}>
      <p class="panel-lead">
        Eight cards on how a model writes, each on the stage beside it. Read one and press its buttons
        {alone.value ? "." : ", then meet its challenges: the engine checks them."}
      </p>
      {!alone.value && !engineHere() && (
        <p class="learn-note">
          The course “Build this engine”, in Python, is in the page with the engine in it, which scripts/site makes.
        </p>
      )}
      <Contents lesson={lesson.value} />
      <article aria-labelledby="learn-title" data-card={current.id}>
        <header>
          <h3 id="learn-title">{current.title}</h3>
          <div class="learn-levels" role="group" aria-label="Level of the text">
            {LEVELS.map((name) => (
              <button type="button" key={name} aria-pressed={level.value === name} onClick={() => (level.value = name)}>
                {name}
              </button>
            ))}
          </div>
        </header>
        <Words of={current} />
        <section class="learn-live" aria-label="On the stage">
          <Widget of={current} lesson={lesson.value} />
        </section>
        {failure.value !== "" && <p class="learn-verdict wrong">{failure.value}</p>}
        {ordered(lesson.value).map(
          (one, index) => one.card === current.id && <Challenge key={one.id} of={one} number={index + 1} />,
        )}
      </article>
      <Turns at={at} />
    </div>
  );
}

/** The challenges card by card. */
const ordered = (lesson: Lesson | null): ChallengeCard[] =>
  CARDS.flatMap(({ id }) => lesson?.challenges.filter((one) => one.card === id) ?? []);

/** The numbers of the cards, with how many of their challenges are met. */
function Contents({ lesson }: { lesson: Lesson | null }) {
  const all = lesson?.challenges ?? [];
  return (
    <nav aria-label="Cards">
      <ol class="learn-contents">
        {CARDS.map(({ id, name }, index) => {
          const own = all.filter((one) => one.card === id);
          const met = own.filter((one) => done.value.includes(one.id)).length;
          const whole = own.length > 0 && met === own.length;
          return (
            <li key={id}>
              <button
                type="button"
                aria-current={card.value === id ? "step" : undefined}
                class={whole ? "whole" : seen.value.includes(id) ? "seen" : ""}
                onClick={() => open(id)}
              >
                <span class="learn-number">{whole ? "✓" : index + 1}</span>
                <span class="learn-name">{name}</span>
                <span class="sr">{own.length > 0 && `, ${met} of ${plural(own.length, "challenge")} solved`}</span>
              </button>
            </li>
          );
        })}
      </ol>
      <p class="learn-progress" role="status">
        {lesson === null
          ? ""
          : `${all.filter(({ id }) => done.value.includes(id)).length} of ${all.length} challenges solved`}
      </p>
    </nav>
  );
}

function Words({ of }: { of: Card }) {
  if (level.value === "formula")
    return (
      <dl class="learn-formulas">
        {of.formulas.map(([formula, says]) => (
          <div key={formula}>
            <dt>{formula}</dt>
            <dd>{says}</dd>
          </div>
        ))}
      </dl>
    );
  const paragraphs = level.value === "in full" ? of.full : [of.short];
  return (
    <div class="learn-words">
      {paragraphs.map((text) => (
        <p key={text}>{text}</p>
      ))}
    </div>
  );
}

function Widget({ of, lesson }: { of: Card; lesson: Lesson | null }) {
  const View = WIDGETS[of.id];
  if (View === undefined) return null;
  return <View key={of.id} facts={lesson?.facts.find(({ card: id }) => id === of.id)?.facts ?? []} />;
}

function Turns({ at }: { at: number }) {
  const before = CARDS[at - 1];
  const after = CARDS[at + 1];
  return (
    <div class="learn-turns">
      <button type="button" disabled={before === undefined} onClick={() => move(-1)} title="Page up">
        ← {before?.name ?? "the first"}
      </button>
      <span class="hint">
        {at + 1} of {CARDS.length}
      </span>
      <button
        type="button"
        class={after ? "bright" : ""}
        disabled={after === undefined}
        onClick={() => move(1)}
        title="Page down"
      >
        {after?.name ?? "the last"} →
      </button>
    </div>
  );
}
