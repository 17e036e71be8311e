// A cell: Python that a reader edits, runs and stops. To stop it ends the worker, and the engine in it starts again: code
// in an endless loop hears no message.

import { useSignal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { save } from "../../run/exports";
import { sentence } from "../../ui/format";
import { restart } from "../../visit/server";
import { ready } from "../../visit/session";
import { cells, lesson, solved } from "./progress";
import * as server from "./server";

interface Props {
  of: server.CourseLesson;
  next: server.CourseLesson | undefined;
}

export function Cell({ of, next }: Props) {
  const checked = useSignal<server.CourseCheck | null>(null);
  const failure = useSignal("");
  const state = useSignal<"rests" | "runs" | "stops">("rests");
  const leaving = useRef(false); // Escape lets the next Tab out of the cell
  const code = cells.value[of.id] ?? of.start;
  const set = (text: string): void => void (cells.value = { ...cells.value, [of.id]: text });

  const run = async (): Promise<void> => {
    if (state.value !== "rests") return;
    state.value = "runs";
    failure.value = "";
    checked.value = null;
    try {
      const { [of.id]: _, ...others } = solved.value;
      const found = await server.check(of.id, code, others);
      checked.value = found;
      if (found.passed) solved.value = { ...others, [of.id]: code };
    } catch (error) {
      failure.value = sentence(error instanceof Error ? error.message : String(error));
    } finally {
      if (state.value === "runs") state.value = "rests";
    }
  };

  const stop = async (): Promise<void> => {
    state.value = "stops";
    await restart();
    await ready();
    state.value = "rests";
    failure.value = "Stopped. The engine has started again.";
  };

  const typed = (event: KeyboardEvent): void => {
    const field = event.currentTarget as HTMLTextAreaElement;
    const out = event.key === "Tab" && (leaving.current || event.shiftKey);
    leaving.current = event.key === "Escape";
    if (event.key === "Escape") event.stopPropagation();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void run();
    else if (event.key === "Enter") insert(field, `\n${indent(field)}`);
    else if (event.key === "Tab" && !out) insert(field, "    ");
    else return;
    event.preventDefault();
    set(field.value);
  };

  const answer = checked.value;
  const lines = code.split("\n").length;
  return (
    <>
      <textarea
        class="course-cell"
        aria-label="Python of this lesson"
        aria-describedby="course-keys"
        rows={Math.max(8, lines)}
        wrap="off"
        spellcheck={false}
        autocapitalize="off"
        autocomplete="off"
        value={code}
        onInput={(event) => set(event.currentTarget.value)}
        onKeyDown={typed}
      />
      <p id="course-keys" class="learn-note">
        Ctrl Enter runs it. Tab indents; Escape, then Tab leaves the cell.
      </p>
      <div class="learn-drives">
        {state.value === "rests" ? (
          <button type="button" class="bright" onClick={() => void run()}>
            Run and check
          </button>
        ) : (
          <button type="button" disabled={state.value === "stops"} onClick={() => void stop()}>
            Stop
          </button>
        )}
        <button type="button" class="learn-drive" disabled={code === of.start} onClick={() => set(of.start)}>
          Begin anew
        </button>
      </div>
      <div role="status">
        {state.value === "runs" && <p class="hint">It runs.</p>}
        {state.value === "stops" && <p class="hint">The engine starts again.</p>}
        {failure.value !== "" && <p class="learn-verdict wrong">{failure.value}</p>}
        {answer !== null && (
          <p class={`learn-verdict ${answer.passed ? "right" : "wrong"}`} data-passed={answer.passed}>
            <b>{answer.passed ? "✓ Right." : "Not yet."}</b> {answer.message}
          </p>
        )}
      </div>
      {answer !== null && answer.output !== "" && (
        <pre class="course-output" tabIndex={0} aria-label="Output">
          {answer.output}
        </pre>
      )}
      {answer?.passed && (
        <div class="learn-drives">
          {next && (
            <button type="button" class="bright" onClick={() => (lesson.value = next.id)}>
              {next.title} →
            </button>
          )}
          {answer.file !== "" && (
            <button
              type="button"
              class="bright"
              onClick={() => save(new Blob([answer.file], { type: "text/x-python" }), "one_file_engine.py")}
            >
              Save your engine
            </button>
          )}
        </div>
      )}
      <details class="learn-challenge">
        <summary>
          <h4>A right answer</h4>
        </summary>
        <pre class="course-output" tabIndex={0} aria-label="A right answer">
          {of.answer}
        </pre>
      </details>
    </>
  );
}

/** In the place of what is selected. */
function insert(field: HTMLTextAreaElement, text: string): void {
  field.setRangeText(text, field.selectionStart, field.selectionEnd, "end");
}

/** The spaces that the next line begins with. */
function indent({ value, selectionStart }: HTMLTextAreaElement): string {
  const line = value.slice(value.lastIndexOf("\n", selectionStart - 1) + 1, selectionStart);
  const spaces = line.length - line.trimStart().length;
  return " ".repeat(spaces + (line.trimEnd().endsWith(":") ? 4 : 0));
}
