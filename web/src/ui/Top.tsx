// The top bar: what runs here, whether it can be reached, and what concerns the page as a whole.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { chooseTrace, openPanel } from "../actions";
import { linkable, share } from "../address";
import { alone, card, helpOpen, pageState, panel, run } from "../store";
import { connection } from "../words";
import { Export } from "./Export";
import { Icon } from "./icons";
import { Theme } from "./Theme";

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
      {!alone.value && (
        <nav class="pages" aria-label="Pages">
          <a href="./" aria-current="page">
            Explorer
          </a>
          <a href="chat">Chat</a>
          <button
            type="button"
            aria-pressed={panel.value === "learn"}
            title="Eight cards beside the stage, with challenges (L)"
            onClick={() => openPanel("learn")}
          >
            Learn
          </button>
        </nav>
      )}
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
        {!alone.value && <CopyLink />}
        <button
          type="button"
          class="tool wide-only"
          onClick={chooseTrace}
          title="Open a trace.json; dropping it on the page does the same"
        >
          <Icon name="open" />
          <span class="tool-word">Open trace</span>
        </button>
        <Export />
        <Theme />
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
  const byHand = useSignal(""); // the link, where this page may not write to the clipboard
  const copy = async () => {
    const link = share();
    try {
      await navigator.clipboard.writeText(link); // over plain http there is no clipboard
    } catch {
      byHand.value = link;
      return;
    }
    copied.value = true;
    setTimeout(() => (copied.value = false), 1600);
  };
  if (byHand.value !== "") return <LinkField link={byHand.value} close={() => (byHand.value = "")} />;
  return (
    <button
      type="button"
      class="tool wide-only"
      onClick={() => void copy()}
      disabled={!linkable()}
      title={
        linkable() || run.value?.origin !== "live"
          ? "Copy a link that runs this prompt again, with the same seed"
          : run.value.card.parent !== null
            ? "A link has the prompt and the seed, which do not make this branch; export the trace instead"
            : "This prompt is too long for a link, or came from the chat; export the trace instead"
      }
    >
      <Icon name="link" />
      <span class="tool-word">{copied.value ? "Copied" : "Copy link"}</span>
    </button>
  );
}

/** A link to copy by hand: selected, until the field is left. */
function LinkField({ link, close }: { link: string; close(): void }) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.select(), []);
  return (
    <input
      ref={field}
      class="link-field"
      aria-label="Link, to copy by hand"
      title="The browser does not let this page write to the clipboard: copy the link with Ctrl+C"
      readOnly
      value={link}
      onBlur={close}
      onKeyDown={(event) => event.key === "Escape" && close()}
    />
  );
}
