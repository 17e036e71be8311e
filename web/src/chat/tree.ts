// A conversation as a tree of turns. An edited message and a regenerated answer are siblings of what was there before, so
// nothing that was said is lost; which child is followed is remembered at each turn. The root stands for the beginning.

export type Role = "root" | "user" | "assistant";

/** What was asked of the model for an answer: enough to ask for the same again. */
export interface Asked {
  model: string;
  system: string;
  temperature: number;
  top_k: number;
  top_p: number;
  max_tokens: number;
  seed: number;
  stop: string[];
}

/** What the server counted and measured for an answer; milliseconds. */
export interface Facts {
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: number;
  disk_tokens: number; // of the cached ones
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
}

export interface Turn {
  id: number;
  parent: number; // of the root: itself
  role: Role;
  text: string;
  pictures?: string[]; // of the user's, before the text: data: URLs
  thought: string; // what a reasoning model wrote before its answer
  children: number[];
  chosen: number; // index of the child that is followed
  state: "done" | "writing" | "stopped" | "failed";
  finish: string; // why the answer ended, in the words of the API
  error: string;
  asked: Asked | null;
  facts: Facts | null;
}

export interface Conversation {
  id: string;
  changed: number; // ms since 1970
  system: string;
  turns: Turn[]; // by id
}

const EMPTY = {
  text: "",
  thought: "",
  chosen: 0,
  state: "done",
  finish: "",
  error: "",
  asked: null,
  facts: null,
} as const;

export function begin(id: string, system: string, now: number): Conversation {
  return { id, changed: now, system, turns: [{ ...EMPTY, id: 0, parent: 0, role: "root", children: [] }] };
}

/** The conversation with a new last child of `parent`, which is followed from now on; and the child's id. */
export function grow(
  old: Conversation,
  parent: number,
  role: Role,
  values: Partial<Turn> = {},
): [Conversation, number] {
  const id = old.turns.length;
  const turns = [...old.turns, { ...EMPTY, ...values, id, parent, role, children: [] } as Turn];
  const above = turns[parent];
  if (above === undefined) throw new Error(`there is no turn ${parent}`);
  turns[parent] = { ...above, children: [...above.children, id], chosen: above.children.length };
  return [{ ...old, turns }, id];
}

export function change(old: Conversation, id: number, values: Partial<Turn>): Conversation {
  return { ...old, turns: old.turns.map((turn) => (turn.id === id ? { ...turn, ...values } : turn)) };
}

/** The turns that are followed from the beginning, without the root. */
export function path(conversation: Conversation): Turn[] {
  const found: Turn[] = [];
  for (let at = conversation.turns[0]; at !== undefined;) {
    at = conversation.turns[at.children[at.chosen] ?? -1];
    if (at !== undefined) found.push(at);
  }
  return found;
}

/** The turns from the beginning to `id`, `id` not included. */
export function before(conversation: Conversation, id: number): Turn[] {
  const found: Turn[] = [];
  for (let at = conversation.turns[id]; at !== undefined && at.id !== 0; at = conversation.turns[at.parent])
    if (at.id !== id) found.unshift(at);
  return found;
}

/** Which of its siblings a turn is, from 0, and how many there are. */
export function place(conversation: Conversation, id: number): { index: number; count: number } {
  const siblings = conversation.turns[conversation.turns[id]?.parent ?? 0]?.children ?? [];
  return { index: siblings.indexOf(id), count: siblings.length };
}

/** Follows the sibling `by` places further; round at the ends. */
export function turnTo(old: Conversation, id: number, by: number): Conversation {
  const parent = old.turns[id]?.parent ?? 0;
  const { index, count } = place(old, id);
  return count === 0 ? old : change(old, parent, { chosen: (index + by + count) % count });
}

/** The first words of a conversation; none where it has not begun. */
export function title(conversation: Conversation): string {
  const text = path(conversation)[0]?.text.trim().split(/\s+/).slice(0, 8).join(" ") ?? "";
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

export interface Message {
  role: "system" | "user" | "assistant";
  content: string | Part[];
}

type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

/** The messages from which the answer `id` was, or is to be, written. */
export function messages(conversation: Conversation, id: number, system: string): Message[] {
  const said = before(conversation, id).map((turn): Message => ({
    role: turn.role as Message["role"],
    content: turn.pictures?.length ? parts(turn.pictures, turn.text) : turn.text,
  }));
  return system === "" ? said : [{ role: "system", content: system }, ...said];
}

const parts = (pictures: string[], text: string): Part[] => [
  ...pictures.map((url): Part => ({ type: "image_url", image_url: { url } })),
  { type: "text", text },
];

/** For a model without a chat template: the text that `id` continues. */
export function prompt(conversation: Conversation, id: number): string {
  return before(conversation, id)
    .map(({ text }) => text)
    .join("");
}
