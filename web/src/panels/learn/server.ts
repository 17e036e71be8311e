// The lesson's calls to the server.

import { call, post } from "../../visit/api";
import type { Checked, Lesson, Losses } from "../../schema/learn";

const LONGEST = 600_000; // ms; a check takes 60 s at most, and a class may have others before it

export const lesson = (): Promise<Lesson> => call("learn");

export const check = (id: string, answer: Record<string, number | string>, signal: AbortSignal): Promise<Checked> =>
  call(`check/${id}`, { ...post({ answer }), signal, timeout: LONGEST });

export const score = (ids: readonly number[]): Promise<Losses> =>
  call("learn/score", { ...post({ ids }), timeout: LONGEST });
