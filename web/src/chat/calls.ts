// The chat's calls to the server: the public API for answers, so that keys, limits and queues hold here as for anybody,
// and two routes of the page's own. A key is sent where one was given.

import { ApiError } from "../visit/api";
import { ask } from "../visit/server";
import type { ChatModel, ChatPrompt } from "../schema/chat";
import * as keep from "./keep";
import { type Heard, read } from "./sse";
import { type Conversation, messages, prompt } from "./tree";

async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const key = keep.key();
  const own: RequestInit =
    key === "" ? init : { ...init, credentials: "omit", headers: { ...init.headers, authorization: `Bearer ${key}` } };
  let answer: Response;
  try {
    answer = await ask(path, own);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("unreachable", 0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  const body = (await answer.json().catch(() => null)) as {
    error?: { kind?: string; code?: string; message?: string };
  } | null;
  const kind = answer.status === 401 ? "key" : (body?.error?.kind ?? body?.error?.code ?? "");
  throw new ApiError(kind, answer.status, body?.error?.message ?? `The server answered ${answer.status}.`);
}

const post = (body: object, signal?: AbortSignal): RequestInit => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  ...(signal ? { signal } : {}),
});

export const model = async (): Promise<ChatModel> => (await call("chat/model")).json() as Promise<ChatModel>;

/** What the model read to write the answer `id`. */
export async function promptOf(conversation: Conversation, id: number, template: boolean): Promise<ChatPrompt> {
  const system = conversation.turns[id]?.asked?.system ?? "";
  const body = template ? { messages: messages(conversation, id, system) } : { prompt: prompt(conversation, id) };
  return (await call("chat/prompt", post(body))).json() as Promise<ChatPrompt>;
}

/** Has the answer `id` written, by its own `asked`. Throws ApiError, and AbortError where it was stopped. */
export async function answer(
  conversation: Conversation,
  id: number,
  template: boolean,
  signal: AbortSignal,
  heard: (chunk: Heard) => void,
): Promise<void> {
  const asked = conversation.turns[id]?.asked;
  if (!asked) throw new Error("an answer that was not asked for");
  const { system, ...sampling } = asked;
  const what = template ? { messages: messages(conversation, id, system) } : { prompt: prompt(conversation, id) };
  const stream = { stream: true, stream_options: { include_usage: true }, return_timings: true };
  const path = template ? "v1/chat/completions" : "v1/completions";
  const reply = await call(path, post({ ...sampling, ...what, ...stream }, signal));
  if (reply.body === null) throw new ApiError("engine", reply.status, "The answer has no body.");
  await read(reply.body, heard);
}
