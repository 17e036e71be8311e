// Generated from src/tokenwright/trace/rooms.py. Do not edit.

import type { About } from "../schema";

export interface ReplicaRoom {
  name: string;
  state: "starting" | "taking" | "draining";
  opened: number;
  texts: number;
  pages: number;
  used: number;
  cached: number;
}

export interface WayPart {
  room: number;
  name: string;
  since: number;
  left: "" | "died" | "replaced";
}

export interface TextRoute {
  number: number;
  prompt: number;
  written: number;
  ended: boolean;
  way: WayPart[];
}

export interface ReplicasCard {
  page_size: number;
  waiting: number;
  rooms: ReplicaRoom[];
  texts: TextRoute[];
}

export const REPLICA_ROOM: Record<string, About> = {
  opened: { source: "counted", unit: "", label: "opened", meaning: "replicas that took this place: beyond 1, after others" },
  texts: { source: "counted", unit: "", label: "texts", meaning: "texts that it writes now" },
  pages: { source: "counted", unit: "", label: "pages", meaning: "pages of its KV cache" },
  used: { source: "counted", unit: "", label: "in use", meaning: "pages that its texts hold" },
  cached: { source: "counted", unit: "", label: "cached", meaning: "pages of ended texts, found by their prefix" },
};

export const WAY_PART: Record<string, About> = {
  since: { source: "counted", unit: "tokens", label: "written before", meaning: "tokens of the text that others had written" },
};

export const TEXT_ROUTE: Record<string, About> = {
  prompt: { source: "counted", unit: "tokens", label: "prompt", meaning: "tokens of the prompt" },
  written: { source: "counted", unit: "tokens", label: "written", meaning: "tokens delivered so far" },
};

export const REPLICAS_CARD: Record<string, About> = {
  waiting: { source: "counted", unit: "", label: "waiting", meaning: "texts that no replica has" },
};
