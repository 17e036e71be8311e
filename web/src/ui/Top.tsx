// The top bar: what runs here, whether it can be reached, and what concerns the page as a whole.

import { useSignal } from "@preact/signals";
import { chooseTrace, exportTrace } from "../actions";
import { share } from "../address";
import { card, helpOpen, pageState, run } from "../store";
import { choice, choose, type Choice } from "../theme";
import { connection } from "../words";
import { Icon } from "./icons";

const NEXT: Record<Choice, Choice> = { auto: "dark", dark: "light", light: "auto" };
const PICTURE = { auto: "auto", dark: "moon", light: "sun" } as const;

export function Top() {
  const shownCard = card.value;
  const id = run.value?.origin === "live" ? run.value.id.value : "";
  const { tone, text } = connection.value;
  return (
    <header class="top">
      <h1 class="wordmark">
        Tokenwright
        <span class="caret" aria-hidden="true" />
      </h1>
      <p class="facts">
        {shownCard && (
          <>
            <span title="model">{shownCard.name}</span>
            <span title="device">{shownCard.device}</span>
            <span title="number format">{shownCard.dtype}</span>
          </>
        )}
      </p>
      <p class={`link ${tone}`} title={`State of the page: ${pageState.value}`}>
        <span class="dot" aria-hidden="true" />
        {text}
      </p>
      {id !== "" && (
        <p class="facts run-id">
          <span title={`Run ${id}`}>run {id.slice(0, 6)}</span>
        </p>
      )}
      <span class="fill" />
      <nav class="tools" aria-label="Page">
        <CopyLink />
        <button
          type="button"
          class="tool"
          onClick={chooseTrace}
          title="Open a trace.json; dropping it on the page does the same"
        >
          <Icon name="open" />
          <span class="tool-word">Open trace</span>
        </button>
        <button
          type="button"
          class="tool"
          onClick={() => void exportTrace()}
          disabled={(run.value?.count.value ?? 0) === 0}
          title="Save this run as trace.json: it plays again without an engine"
        >
          <Icon name="save" />
          <span class="tool-word">Export trace</span>
        </button>
        <button
          type="button"
          class="tool square"
          onClick={() => choose(NEXT[choice.value])}
          aria-label={`Colours: ${choice.value}`}
          title={`Colours: ${choice.value}. Next: ${NEXT[choice.value]}`}
        >
          <Icon name={PICTURE[choice.value]} />
        </button>
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

function CopyLink() {
  const copied = useSignal(false);
  const copy = async () => {
    const link = share();
    await navigator.clipboard?.writeText(link).catch(() => undefined);
    copied.value = true;
    setTimeout(() => (copied.value = false), 1600);
  };
  return (
    <button
      type="button"
      class="tool wide-only"
      onClick={() => void copy()}
      disabled={run.value?.origin !== "live"}
      title="Copy a link that runs this prompt again, with the same seed"
    >
      <Icon name="link" />
      <span class="tool-word">{copied.value ? "Copied" : "Copy link"}</span>
    </button>
  );
}
