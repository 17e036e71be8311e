// The course: seven cells of Python, which together are the engine in one file. They run in the worker of the engine.

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { sentence } from "../../ui/format";
import { model } from "../../visit/store";
import { Cell } from "./Cell";
import { lesson, solved } from "./progress";
import * as server from "./server";
import "../../style/panels/learn.css";
import "../../style/panels/course.css";

export default function Course() {
  const lessons = useSignal<server.CourseLesson[]>([]);
  const failure = useSignal("");
  const ready = model.value !== null;
  useEffect(() => {
    if (!ready) return;
    server.lessons().then(
      (found) => (lessons.value = found.lessons),
      (error: unknown) => (failure.value = sentence(error instanceof Error ? error.message : String(error))),
    );
  }, [ready]);
  const all = lessons.value;
  const at = Math.max(
    0,
    all.findIndex(({ id }) => id === lesson.value),
  );
  const current = all[at];
  const right = all.filter(({ id }) => id in solved.value).length;
  return (
    <div class="learn course">
      <p class="panel-lead">
        Build this engine: seven cells of Python that run in this page, beside the engine. Together they are the engine
        in one file.
      </p>
      {!ready && <p class="hint">The engine is loading.</p>}
      {failure.value !== "" && <p class="learn-verdict wrong">{failure.value}</p>}
      {current && (
        <>
          <nav aria-label="Lessons">
            <ol class="learn-contents">
              {all.map(({ id, title }, index) => (
                <li key={id}>
                  <button
                    type="button"
                    aria-current={index === at ? "step" : undefined}
                    class={id in solved.value ? "whole" : ""}
                    onClick={() => (lesson.value = id)}
                  >
                    <span class="learn-number">{id in solved.value ? "✓" : index + 1}</span>
                    <span class="learn-name">{title}</span>
                  </button>
                </li>
              ))}
            </ol>
            <p class="learn-progress" role="status">
              {right} of {all.length} lessons solved
            </p>
          </nav>
          <article aria-labelledby="course-title" data-lesson={current.id}>
            <h3 id="course-title">{current.title}</h3>
            <div class="learn-words">
              {current.text.map((paragraph) => (
                <p key={paragraph}>{paragraph}</p>
              ))}
            </div>
            <Cell key={current.id} of={current} next={all[at + 1]} />
          </article>
        </>
      )}
    </div>
  );
}
