// Answers that the engine computes about a recorded step on request. An answer is kept with the run. So is a refusal, for the
// server's run that gave it; where the server did not answer, the same request is made again.

import { signal } from "@preact/signals";
import { ApiError } from "../../visit/api";
import { sentence } from "../../ui/format";
import type { Run } from "../run";

const AGAIN = 1000; // ms before a request without an answer is repeated
const TRANSIENT = ["unreachable", "loading"];

interface Refusal {
  run: string; // the server's name of the run
  why: string;
}

export class Answers<T> {
  private readonly found = new WeakMap<Run, Map<string, T>>();
  private readonly refused = new WeakMap<Run, Map<string, Refusal>>();
  private readonly arrivals = signal(0); // each lets the readers look again

  get(run: Run, key: string): T | null {
    void this.arrivals.value;
    return this.found.get(run)?.get(key) ?? null;
  }

  /** Why the server refuses the answer; empty: it does not. */
  refusal(run: Run, key: string): string {
    void this.arrivals.value;
    const known = this.refused.get(run)?.get(key);
    return known?.run === run.id.value ? known.why : "";
  }

  /** Whether the server has answered; an effect that reads it runs again when it is time to ask once more. */
  known(run: Run, key: string): boolean {
    return this.get(run, key) !== null || this.refusal(run, key) !== "";
  }

  async ask(run: Run, key: string, request: (id: string) => Promise<T>): Promise<void> {
    const id = run.id.value;
    try {
      put(this.found, run, key, await request(id));
    } catch (error) {
      const known = error instanceof ApiError;
      if (known && TRANSIENT.includes(error.kind)) await new Promise((resolve) => setTimeout(resolve, AGAIN));
      else put(this.refused, run, key, { run: id, why: sentence(known ? error.message : String(error)) });
    }
    this.arrivals.value++;
  }
}

function put<V>(all: WeakMap<Run, Map<string, V>>, run: Run, key: string, value: V): void {
  const own = all.get(run) ?? new Map<string, V>();
  all.set(run, own.set(key, value));
}
