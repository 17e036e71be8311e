// The chat page: conversations at the left, the branch that is followed in the middle, what the next answer is asked for
// at the right. On narrow screens the sides open over the middle, one at a time.

import { signal } from "@preact/signals";
import { Icon } from "../../ui/icons";
import { Theme } from "../../ui/Theme";
import { announcement, model, needsKey, turns, unkept, useKey, waiting, writing } from "../store";
import { Composer } from "./Composer";
import { Conversations } from "./Conversations";
import { Settings } from "./Settings";
import { Turns } from "./Turns";
import { modelName } from "../../ui/format";

type Side = "conversations" | "settings" | null;
const side = signal<Side>(null);

export function Chat() {
  return (
    <div class="chat" data-side={side.value ?? ""} data-writing={writing.value !== null}>
      <Top />
      <Conversations close={() => (side.value = null)} />
      <main class="talk" aria-label="Conversation">
        <Notices />
        {turns.value.length === 0 ? <Welcome /> : <Turns />}
        <Composer />
      </main>
      <Settings />
      <p class="sr" role="status" aria-live="polite">
        {announcement.value}
      </p>
    </div>
  );
}

function Top() {
  return (
    <header class="top">
      <h1 class="wordmark">
        Tokenwright
        <span class="caret" aria-hidden="true" />
      </h1>
      <nav class="pages" aria-label="Pages">
        <a href="./">Explorer</a>
        <a href="chat" aria-current="page">
          Chat
        </a>
      </nav>
      {model.value && (
        <p class="facts">
          <span title={`model: ${model.value.name}`}>{modelName(model.value.name)}</span>
        </p>
      )}
      <span class="fill" />
      <nav class="tools" aria-label="Page">
        <SideButton which="conversations" name="Conversations" icon="list" />
        <SideButton which="settings" name="Options" icon="dials" />
        <Theme />
      </nav>
    </header>
  );
}

function SideButton({ which, name, icon }: { which: Side; name: string; icon: "list" | "dials" }) {
  const open = side.value === which;
  return (
    <button
      type="button"
      class="tool side-button"
      aria-label={name}
      aria-pressed={open}
      onClick={() => (side.value = open ? null : which)}
    >
      <Icon name={icon} />
      <span class="tool-word">{name}</span>
    </button>
  );
}

function Notices() {
  return (
    <>
      {needsKey.value && <KeyField />}
      {!needsKey.value && model.value === null && <p class="notice">{waiting.value}</p>}
      {model.value?.template === false && (
        <p class="notice">
          This model has no chat template: it was made to continue texts, not for conversations. What you write is the
          beginning of a text, and the model continues it.
        </p>
      )}
      {unkept.value && (
        <p class="notice" role="alert">
          This browser’s storage is full or forbidden: the conversation lasts as long as this page.
        </p>
      )}
    </>
  );
}

function KeyField() {
  const use = (event: SubmitEvent) => {
    event.preventDefault();
    const field = (event.currentTarget as HTMLFormElement).elements.namedItem("key");
    if (field instanceof HTMLInputElement) useKey(field.value.trim());
  };
  return (
    <form class="notice key" onSubmit={use}>
      <label for="key">This server demands a key. It stays in this tab.</label>
      <input id="key" name="key" type="password" autocomplete="off" required />
      <button type="submit">Use this key</button>
    </form>
  );
}

function Welcome() {
  const continues = model.value?.template === false;
  return (
    <div class="welcome">
      <p class="welcome-line">{continues ? "Begin a text." : "Ask the model something."}</p>
      <p class="under">
        Below each answer stands what the KV cache reused for it. <em>Look inside</em> opens that very run in the
        explorer.
      </p>
    </div>
  );
}
