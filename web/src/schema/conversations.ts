// Generated from src/tokenwright/explorer/panels/conversations.py. Do not edit.

import type { About } from "../schema";

export interface ConversationTurn {
  name: string;
  cause: string;
  part: string;
  change: string;
  before: string;
  now: string;
  at: number | null;
  prompt: number;
  reused: number;
  new: number;
  again: number;
  written: number;
}

export interface ConversationCard {
  title: string;
  session: string;
  turns: ConversationTurn[];
  tokens: number;
  in_memory: number;
  on_disk: number;
}

export interface PinnedPrefix {
  session: string;
  tokens: number;
  left_s: number;
}

export interface ConversationsCard {
  conversations: ConversationCard[];
  pins: PinnedPrefix[];
  reused: number;
  computed: number;
}

export const CONVERSATION_TURN: Record<string, About> = {
  at: { source: "counted", unit: "", label: "from token", meaning: "the first token that differs or was missing" },
  prompt: { source: "counted", unit: "tokens", label: "prompt", meaning: "tokens of the prompt" },
  reused: { source: "counted", unit: "tokens", label: "reused", meaning: "prompt tokens whose K and V were found" },
  new: { source: "counted", unit: "tokens", label: "new", meaning: "prompt tokens that were computed for the first time" },
  again: { source: "counted", unit: "tokens", label: "again", meaning: "prompt tokens that were computed before, and again" },
  written: { source: "counted", unit: "tokens", label: "written", meaning: "tokens of the answer" },
};

export const CONVERSATION_CARD: Record<string, About> = {
  tokens: { source: "counted", unit: "tokens", label: "tokens", meaning: "of the last prompt and its answer" },
  in_memory: { source: "counted", unit: "tokens", label: "in memory", meaning: "of these, those that a next turn would find in memory" },
  on_disk: { source: "counted", unit: "tokens", label: "on the disk", meaning: "of the others, those whose pages are on the disk" },
};

export const PINNED_PREFIX: Record<string, About> = {
  tokens: { source: "counted", unit: "tokens", label: "pinned", meaning: "tokens of the prefix" },
  left_s: { source: "derived", unit: "s", label: "left", meaning: "seconds until it ends, if it is not used again" },
};

export const CONVERSATIONS_CARD: Record<string, About> = {
  reused: { source: "counted", unit: "tokens", label: "reused", meaning: "prompt tokens of all these turns that were found" },
  computed: { source: "counted", unit: "tokens", label: "computed", meaning: "prompt tokens of all these turns that were not" },
};
