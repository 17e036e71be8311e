// The prompt line: the text, the prompts that start on a click, Run, and the settings behind a gear. Problems with a run
// that was asked for are said here, beside what would mend them.

import { dismiss } from "../visit/actions";
import { start, visit } from "../visit/session";
import * as nextRun from "../run/next-run";
import { type Problem, alone, clustered, joined, model, pageState, problem, result, run, site } from "../visit/store";
import { align } from "./text";
import { count, plural, sentence } from "./format";
import { Icon } from "./icons";
import { Settings } from "./Settings";

const READY = nextRun.PROMPTS.slice(0, 3);
const UNRUN = "Replicas make no runs to step through";

export function Prompt() {
  if (alone.value)
    return (
      <div class="prompt-row">
        <div class="prompt-line">
          <p class="prompt-alone">{run.value?.card.prompt ?? ""}</p>
          {site.value !== null && (
            <div class="presets" role="group" aria-label="Recorded runs">
              {site.value.runs.map(({ id, name, prompt }) => (
                <button
                  type="button"
                  key={id}
                  aria-pressed={joined.value === id}
                  title={`Play: ${prompt}`}
                  onClick={() => void visit(id)}
                >
                  {name}
                </button>
              ))}
            </div>
          )}
          <Settings />
        </div>
      </div>
    );
  const busy = pageState.value === "tokenizing";
  const ready = model.value !== null && nextRun.prompt.value !== "" && !busy && !clustered.value;
  const go = (event: Event) => {
    event.preventDefault();
    void start();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go(event);
    if (event.key === "Escape") (event.currentTarget as HTMLElement).blur();
  };
  const lines = Math.min(4, nextRun.prompt.value.split("\n").length);
  return (
    <form class="prompt-row" onSubmit={go} aria-label="Prompt">
      <div class="prompt-line">
        <label class="sr" for="prompt">
          Prompt
        </label>
        <textarea
          id="prompt"
          rows={lines}
          spellcheck={false}
          value={nextRun.prompt.value}
          placeholder="Write the beginning of a text"
          onInput={(event) => (nextRun.prompt.value = event.currentTarget.value)}
          onKeyDown={onKey}
          aria-describedby="chips-count"
        />
        <button
          type="submit"
          class={result.value === null ? "run" : "run calm"}
          disabled={!ready}
          title={clustered.value ? UNRUN : "Run this prompt (Ctrl Enter in the box)"}
        >
          <Icon name="play" />
          Run
        </button>
        <div class="presets" role="group" aria-label="Ready prompts">
          {READY.map(({ name, text }) => (
            <button
              type="button"
              key={name}
              aria-pressed={nextRun.prompt.value === text}
              disabled={clustered.value}
              title={clustered.value ? UNRUN : `Run: ${text}`}
              onClick={() => {
                nextRun.prompt.value = text;
                void start();
              }}
            >
              {name}
            </button>
          ))}
        </div>
        <Settings />
      </div>
      <Trouble />
    </form>
  );
}

/** What is wrong with what was asked for, and one way out of it. */
function Trouble() {
  const trouble = problem.value;
  if (trouble === null || trouble.kind === "trace") return null;
  return (
    <div class="trouble" role="alert">
      <p>{sentence(trouble.message)}</p>
      {trouble.again && <Fix kind={trouble.kind} message={trouble.message} again={trouble.again} />}
      <button type="button" class="quiet" onClick={dismiss} aria-label="Dismiss">
        <Icon name="close" />
      </button>
    </div>
  );
}

/** For a run that did not start: what would mend it, or another attempt. */
function Fix({ kind, message, again }: Required<Problem>) {
  if (kind === "bad_request") return null; // the sentence says what to change
  const cards = nextRun.tokens.value?.text === nextRun.prompt.value ? nextRun.tokens.value.cards : null;
  const over = Number(/shorten it by (\d+)/.exec(message)?.[1] ?? NaN);
  if (kind === "context_overflow" && over > 0 && cards !== null) {
    // The beginning goes: what is nearest to the end says most about how it goes on.
    const pieces = align(nextRun.prompt.value, cards);
    const begins = cards.filter((card) => card.special).length;
    const room = Math.min(nextRun.maxTokens.value, (cards.length - over) >> 1); // for what is to be written
    const shorter = pieces.slice(over + room + begins).join("");
    return (
      <button type="button" onClick={() => (nextRun.prompt.value = shorter)}>
        Drop the first {plural(over + room, "token")}, to write {count(room)}
      </button>
    );
  }
  if (kind === "capacity" && nextRun.maxTokens.value > 32) {
    const fewer = Math.max(32, nextRun.maxTokens.value >> 1);
    return (
      <button type="button" onClick={() => (nextRun.maxTokens.value = fewer)}>
        Use {fewer} max tokens
      </button>
    );
  }
  return (
    <button type="button" onClick={again}>
      Try again
    </button>
  );
}
