// The calls to the engine's server, one function each. An answer that is not a success becomes an ApiError with the
// server's own kind and sentence; no answer at all becomes one of kind "unreachable".

import type { AttentionRow, HeadMasses, Loading, ModelCard, RunCard, RunState, TokenCard } from "./schema";

export class ApiError extends Error {
  constructor(
    readonly kind: string, // bad_request, context_overflow, capacity, engine, gone, loading; here also: unreachable
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export interface RunRequest {
  prompt: string;
  ids?: number[]; // of the prompt, where its text alone does not tell them
  written?: number[];
  max_tokens: number;
  temperature: number;
  top_k: number;
  top_p: number;
  seed: number | null;
  stop: string[];
  ignore_eos: boolean;
  cache: boolean;
  layer: number;
  head: number;
  first_step?: number;
}

/** An address on the page's own server, also where the page is served under a path. */
export function address(path: string): URL {
  return new URL(path, document.baseURI);
}

async function call<T>(path: string, options: RequestInit & { timeout?: number } = {}): Promise<T> {
  const { timeout = 20_000, ...init } = options;
  let answer: Response;
  try {
    answer = await fetch(address(path), { ...init, signal: AbortSignal.timeout(timeout) });
  } catch {
    throw new ApiError("unreachable", 0, "The engine does not answer.");
  }
  const body: unknown = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body as T;
  const { error } = (body ?? {}) as { error?: { kind?: string; message?: string } };
  const kind = error?.kind ?? (answer.status === 404 || answer.status === 410 ? "gone" : "engine");
  throw new ApiError(kind, answer.status, error?.message ?? `The server answered ${answer.status}.`);
}

const post = (body: object): RequestInit => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
});

export const status = (timeout = 4000): Promise<Loading> => call("status", { timeout });
export const model = (): Promise<ModelCard> => call("model");
export const createRun = (request: RunRequest): Promise<RunCard> => call("runs", post(request));
export const runState = (id: string): Promise<RunState> => call(`runs/${id}`, { timeout: 4000 });

export async function tokenize(text: string): Promise<TokenCard[]> {
  return (await call<{ tokens: TokenCard[] }>("tokenize", post({ text }))).tokens;
}

export const heads = (id: string, step: number): Promise<HeadMasses> => call(`runs/${id}/heads?step=${step}`);

/** Frees what a run holds. Nobody waits for it: a run that is left alone ends by itself. */
export function deleteRun(id: string): void {
  fetch(address(`runs/${id}`), { method: "DELETE", keepalive: true }).catch(() => undefined);
}

export async function attention(id: string, step: number, layer: number, head: number): Promise<AttentionRow> {
  const row = await call<Omit<AttentionRow, "codes"> & { codes: string }>(
    `runs/${id}/attention?step=${step}&layer=${layer}&head=${head}`,
  );
  return { ...row, codes: Uint8Array.from(atob(row.codes), (letter) => letter.charCodeAt(0)) };
}
