// Conversations in this browser's storage, and nowhere else: the server keeps none. Each has an entry of its own, so that
// two tabs do not overwrite each other's. The key of the API lasts as long as the tab.

import type { Conversation } from "./tree";

const PREFIX = "tokenwright-chat-";
const OPTIONS = "tokenwright-chatting";
const KEY = "tokenwright-key";

/** How the next answer is sampled. null: as the model's checkpoint suggests; of the seed: a fresh one each time. */
export interface Options {
  system: string;
  temperature: number | null;
  top_k: number | null;
  top_p: number | null;
  max_tokens: number;
  seed: number | null;
  stop: string;
}

export const USUAL: Options = {
  system: "",
  temperature: null,
  top_k: null,
  top_p: null,
  max_tokens: 512,
  seed: null,
  stop: "",
};

/** All conversations, the newest first. */
export function all(): Conversation[] {
  const found: Conversation[] = [];
  try {
    for (const name of Object.keys(localStorage)) {
      if (!name.startsWith(PREFIX)) continue;
      const conversation = read(localStorage.getItem(name));
      if (conversation !== null) found.push(conversation);
    }
  } catch {
    // Where storage is forbidden, conversations last as long as the page.
  }
  return found.sort((a, b) => b.changed - a.changed);
}

export function one(id: string): Conversation | null {
  try {
    return read(localStorage.getItem(PREFIX + id));
  } catch {
    return null;
  }
}

/** An answer that was being written when the page was left has stopped. */
function read(text: string | null): Conversation | null {
  try {
    const found = JSON.parse(text ?? "null") as Conversation | null;
    if (!Array.isArray(found?.turns) || typeof found.id !== "string") return null;
    const turns = found.turns.map((turn) => (turn.state === "writing" ? { ...turn, state: "stopped" as const } : turn));
    return { ...found, turns };
  } catch {
    return null;
  }
}

/** Returns whether there was room. */
export function save(conversation: Conversation): boolean {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id: string): void {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was never kept.
  }
}

export function options(): Options {
  try {
    return { ...USUAL, ...(JSON.parse(localStorage.getItem(OPTIONS) ?? "{}") as Partial<Options>) };
  } catch {
    return USUAL;
  }
}

export function saveOptions(next: Options): void {
  try {
    localStorage.setItem(OPTIONS, JSON.stringify(next));
  } catch {
    // They last as long as the page.
  }
}

export function key(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(next: string): void {
  try {
    sessionStorage.setItem(KEY, next);
  } catch {
    // It lasts as long as the page.
  }
}
