// The top bar: what the page is, the ways in, and what concerns the page as a whole.

import { openPanel } from "../visit/actions";
import { PANELS } from "../panels";
import { alone, clustered, helpOpen, pageState, panel, panelled, site } from "../visit/store";
import { connection } from "../visit/messages";
import { Icon } from "./icons";
import { Share } from "./Share";

export function Top() {
  const { tone, text } = connection.value;
  const group = PANELS.find(({ id }) => id === panel.value)?.group;
  const inside = group === "Numbers" || group === "Look inside" || group === "Experiments";
  return (
    <header class="top">
      <h1 class="wordmark">
        Tokenwright
        <span class="caret" aria-hidden="true" />
      </h1>
      <p class="purpose">A language model writes; you see what its KV cache saves</p>
      {tone !== "good" && (
        <p class={`link ${tone}`} title={`State of the page: ${pageState.value}`}>
          <span class="dot" aria-hidden="true" />
          {text}
        </p>
      )}
      <span class="fill" />
      <nav class="tools" aria-label="Page">
        {panelled.value && !clustered.value && (
          <button
            type="button"
            class="tool start-here"
            aria-label="Start here"
            aria-pressed={group === "Guide"}
            title="The idea in ten minutes: scenes on the stage, and guesses that the engine checks"
            onClick={() => openPanel("guide")}
          >
            <span>
              Start<span class="tool-more"> here</span>
            </span>
          </button>
        )}
        {(!alone.value || site.value !== null) && (
          <button
            type="button"
            class="tool"
            aria-pressed={group === "Learn"}
            title="Eight cards beside the stage, with challenges (L)"
            onClick={() => openPanel("learn")}
          >
            Learn
          </button>
        )}
        <button
          type="button"
          class="tool"
          aria-label="Look inside"
          aria-pressed={group === "Look inside"}
          title="Numbers, what the model does inside, and experiments"
          onClick={() => (panel.value = inside ? null : "next")}
        >
          <span class="tool-inside">
            <span class="tool-more">Look </span>inside
          </span>
        </button>
        {!alone.value && (
          <a class="tool" href="chat">
            Chat
          </a>
        )}
        <Share />
        <button
          type="button"
          class="tool square"
          onClick={() => (helpOpen.value = true)}
          aria-label="Help and keys"
          title="Help and keys (?)"
        >
          <Icon name="help" />
        </button>
      </nav>
    </header>
  );
}
