// An answer of the public API as it streams: server-sent events, in which each `data:` line is a chunk of OpenAI's form.
// The reader takes chats and completions alike, and knows nothing of the page.

import { ApiError } from "../visit/api";

export interface Heard {
  text: string;
  thought: string;
  finish: string | null;
  usage: Usage | null;
  timings: Timings | null;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details: { cached_tokens: number; disk_tokens?: number };
}

export interface Timings {
  queue_ms: number;
  prefill_ms: number;
  decode_ms: number;
}

interface Chunk {
  choices?: {
    text?: string;
    delta?: { content?: string; reasoning_content?: string };
    finish_reason?: string | null;
  }[];
  usage?: Usage | null;
  timings?: Timings;
  error?: { message?: string; type?: string };
}

/** The chunk of one line; null: the line has none. Throws ApiError for one that reports a failure. */
export function chunk(line: string): Heard | null {
  if (!line.startsWith("data:")) return null;
  const data = line.slice(5).trim();
  if (data === "[DONE]" || data === "") return null;
  const { choices, usage, timings, error } = JSON.parse(data) as Chunk;
  if (error) throw new ApiError(error.type ?? "engine", 500, error.message ?? "The engine failed.");
  const choice = choices?.[0];
  return {
    text: choice?.text ?? choice?.delta?.content ?? "",
    thought: choice?.delta?.reasoning_content ?? "",
    finish: choice?.finish_reason ?? null,
    usage: usage ?? null,
    timings: timings ?? null,
  };
}

/** Calls `heard` for every chunk of a stream, however its bytes are cut. */
export async function read(stream: ReadableStream<Uint8Array>, heard: (chunk: Heard) => void): Promise<void> {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
    rest = done ? "" : (lines.pop() ?? "");
    for (const line of lines) {
      const found = chunk(line.trimEnd());
      if (found) heard(found);
    }
    if (done) return;
  }
}
