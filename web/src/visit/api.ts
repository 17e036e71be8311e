// The calls to the engine's server, one function each. An answer that is not a success becomes an ApiError with the
// server's own kind and sentence; no answer at all becomes one of kind "unreachable".

import { ask } from "./server";
import type { AttentionRow, HeadMasses, Loading, ModelCard, RunCard, RunState, TokenCard } from "../schema";
import type { Branches } from "../schema/branches";
import type { SamplerView } from "../schema/sampler";
import type { RunTimes } from "../schema/times";
import type { RaceCard, RaceEnd, RaceStep } from "../schema/race";

export class ApiError extends Error {
  constructor(
    readonly kind: string, // bad_request, context_overflow, capacity, engine, gone, loading; here also: unreachable
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** What the engine needs of a step that a lost run made, for the figures of the whole run. */
export interface EarlierStep {
  start: number;
  length: number;
  layer_tokens: number;
  step_us: number;
  token: number | null;
}

export interface RunRequest {
  prompt: string;
  ids?: number[]; // of the prompt, where its text does not tell them
  pictures?: string; // the name of its pictures on the server
  written?: number[];
  max_tokens: number;
  temperature: number;
  top_k: number;
  top_p: number;
  min_p?: number;
  repetition_penalty?: number;
  seed: number | null;
  stop: string[];
  ignore_eos: boolean;
  cache: boolean;
  layer: number;
  head: number;
  first_step?: number;
  earlier?: EarlierStep[];
}

export interface RaceRequest extends Partial<Settings> {
  prompt: string;
  max_tokens: number;
  seed: number | null;
  every: number; // the uncached lane computes every `every`-th step
  budget_s: number;
}

/** What a fork is asked for: null and what is left out are as in its parent. */
export interface ForkRequest extends Partial<Settings> {
  step: number;
  token: number | null;
  max_tokens?: number;
  seed?: number | null;
}

/** The dials of the sampler. */
export interface Settings {
  temperature: number;
  top_k: number;
  top_p: number;
  min_p: number;
  repetition_penalty: number;
}

export async function call<T>(path: string, options: RequestInit & { timeout?: number } = {}): Promise<T> {
  const { timeout = 20_000, ...init } = options;
  let answer: Response;
  try {
    const limit = AbortSignal.timeout(timeout);
    answer = await ask(path, {
      ...init,
      signal: init.signal ? AbortSignal.any([init.signal, limit]) : limit,
    });
  } catch {
    throw new ApiError("unreachable", 0, "The engine does not answer.");
  }
  const body: unknown = await answer.json().catch(() => null);
  if (answer.ok && (body !== null || answer.status === 204)) return body as T;
  throw refusal(answer, body);
}

/** The error of an answer that is not a success. */
function refusal(answer: Response, body: unknown): ApiError {
  const { error } = (body ?? {}) as { error?: { kind?: string; message?: string } };
  const kind = error?.kind ?? (answer.status === 404 || answer.status === 410 ? "gone" : "engine");
  return new ApiError(kind, answer.status, error?.message ?? `The server answered ${answer.status}.`);
}

export const post = (body: object): RequestInit => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
});

export const status = (timeout = 4000): Promise<Loading> => call("status", { timeout });
export const model = (): Promise<ModelCard> => call("model");
export const createRun = (request: RunRequest): Promise<RunCard> => call("runs", post(request));
export const forkRun = (id: string, request: ForkRequest): Promise<RunCard> => call(`runs/${id}/fork`, post(request));
export const branches = (id: string): Promise<Branches> => call(`runs/${id}/branches`);
/** The times of an ended run's text, both ways: steps are measured for it, one run after the other. */
export const times = (id: string, signal: AbortSignal): Promise<RunTimes> =>
  call(`runs/${id}/times`, { timeout: 300_000, signal });
export const runState = (id: string): Promise<RunState> => call(`runs/${id}`, { timeout: 4000 });

export async function tokenize(text: string): Promise<TokenCard[]> {
  return (await call<{ tokens: TokenCard[] }>("tokenize", post({ text }))).tokens;
}

/** What the sampler makes of a step's logits with these settings. The model computes nothing for it. */
export function sampled(id: string, step: number, settings: Partial<Settings>): Promise<SamplerView> {
  const wanted = Object.entries(settings).map(([name, value]) => [name, String(value)]);
  return call(`runs/${id}/sampler?${new URLSearchParams([["step", String(step)], ...wanted])}`);
}

/** Runs a race, and passes on its messages as they come. Ends early by `signal`. */
export async function race(
  request: RaceRequest,
  signal: AbortSignal,
  told: (message: RaceCard | RaceStep | RaceEnd) => void,
): Promise<void> {
  const answer = await ask("race", { ...post(request), signal }).catch((error: unknown) => {
    if (signal.aborted) throw error;
    throw new ApiError("unreachable", 0, "The engine does not answer.");
  });
  if (!answer.ok || answer.body === null) throw refusal(answer, await answer.json().catch(() => null));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop() ?? "";
    for (const event of events)
      if (event.startsWith("data: ")) told(JSON.parse(event.slice(6)) as RaceCard | RaceStep | RaceEnd);
  }
}

export const heads = (id: string, step: number): Promise<HeadMasses> => call(`runs/${id}/heads?step=${step}`);

/** Frees what a run holds. It never fails: a run that is left alone ends by itself. */
export const endRun = (id: string): Promise<unknown> =>
  ask(`runs/${id}`, { method: "DELETE", keepalive: true }).catch(() => undefined);

export async function attention(id: string, step: number, layer: number, head: number): Promise<AttentionRow> {
  const row = await call<Omit<AttentionRow, "codes"> & { codes: string }>(
    `runs/${id}/attention?step=${step}&layer=${layer}&head=${head}`,
  );
  return { ...row, codes: Uint8Array.from(atob(row.codes), (letter) => letter.charCodeAt(0)) };
}
