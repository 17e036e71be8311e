// The stream of one run: a WebSocket that is opened again when it breaks, after 0.5 s, then 1, 2, 4 and 8, and asks for
// the first step it has not seen. It owns the link and nothing else: frames go to the listener, which says which step
// is next. A run that the server does not know any more is reported once as lost; rebuilding it is the listener's.

import * as api from "./api";
import { open, type Stream as Link } from "./server";
import { decodeFrame, type Labels, type RunCard, type RunState, type StepFrame } from "../schema";

export type Op =
  | { op: "ack"; step: number }
  | { op: "play"; pace: number | null }
  | { op: "pause" }
  | { op: "step" }
  | { op: "cache"; on: boolean }
  | { op: "watch"; layer: number; head: number };

export interface Listener {
  next(): number; // the first step that is not here yet
  waiting(): boolean; // whether something is expected, so that silence means something
  opened(): void;
  state(state: RunState): void;
  labels(labels: Labels): void;
  frame(frame: StepFrame): void;
  broken(retryAt: number): void; // ms, as performance.now()
  lost(): void;
}

const LOST = [4404, 4410];
const FIRST_WAIT = 500;
const LONGEST_WAIT = 8000;
const SILENCE = 1000; // ms without a message before the server is asked whether it lives
const OPENING = 4000; // ms that opening may take

export class Stream {
  private socket: Link | null = null;
  private wait = FIRST_WAIT;
  private heard = 0;
  private misses = 0;
  private closed = false;
  private retry: ReturnType<typeof setTimeout> | undefined;
  private readonly watch = setInterval(() => void this.ping(), SILENCE);

  constructor(
    readonly id: string,
    private readonly listener: Listener,
  ) {
    this.open();
  }

  /** False when the link is down: the op is not sent, and nothing is queued for later. */
  send(op: Op): boolean {
    if (this.socket?.state !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(op));
    return true;
  }

  /** Try again now, without waiting out the pause. */
  hurry(): void {
    if (this.retry === undefined) return;
    clearTimeout(this.retry);
    void this.again();
  }

  close(): void {
    this.closed = true;
    clearInterval(this.watch);
    clearTimeout(this.retry);
    this.drop();
  }

  private open(): void {
    clearTimeout(this.retry);
    this.retry = undefined;
    const socket = open(`runs/${this.id}/stream?since_step=${this.listener.next()}`, {
      message: (data) => this.socket === socket && this.take(data),
      closed: (code) => {
        clearTimeout(late);
        if (this.socket !== socket) return;
        if (LOST.includes(code)) this.lose();
        else this.fail(socket);
      },
    });
    this.socket = socket;
    this.heard = performance.now();
    const late = setTimeout(() => socket.state === WebSocket.CONNECTING && this.fail(socket), OPENING);
  }

  private take(data: ArrayBuffer | string): void {
    this.heard = performance.now();
    this.misses = 0;
    if (typeof data !== "string") {
      const frame = decodeFrame(data);
      if (frame.step > this.listener.next())
        this.fail(this.socket); // a gap: ask again from where we are
      else this.listener.frame(frame);
      return;
    }
    const message = JSON.parse(data) as RunCard | RunState | Labels;
    if (message.kind === "run") {
      this.wait = FIRST_WAIT;
      this.listener.opened();
    } else if (message.kind === "state") this.listener.state(message);
    else if (message.kind === "labels") this.listener.labels(message);
  }

  /** Silence while something is expected: a slow step, or a dead server? The status tells them apart. */
  private async ping(): Promise<void> {
    const socket = this.socket;
    if (socket?.state !== WebSocket.OPEN || !this.listener.waiting()) return;
    if (performance.now() - this.heard < SILENCE) return;
    const asked = performance.now();
    try {
      await api.status(SILENCE);
      this.misses = 0;
    } catch {
      // A refusal is an answer; a late one may be a busy machine, so it takes two of them.
      this.misses += performance.now() - asked < SILENCE * 0.9 ? 2 : 1;
      if (this.misses >= 2 && this.socket === socket) this.fail(socket);
    }
  }

  private fail(socket: Link | null): void {
    if (this.closed || this.socket !== socket) return;
    this.drop();
    this.misses = 0;
    this.listener.broken(performance.now() + this.wait);
    this.retry = setTimeout(() => void this.again(), this.wait);
    this.wait = Math.min(LONGEST_WAIT, this.wait * 2);
  }

  /** A refused handshake does not say why, so the run is asked for first: it may be gone for good. */
  private async again(): Promise<void> {
    this.retry = undefined;
    try {
      await api.runState(this.id);
    } catch (error) {
      if (this.closed) return;
      const gone = error instanceof api.ApiError && ["gone", "loading"].includes(error.kind);
      if (gone) this.lose();
      else this.fail(this.socket);
      return;
    }
    if (!this.closed) this.open();
  }

  private lose(): void {
    if (this.closed) return;
    this.close();
    this.listener.lost();
  }

  private drop(): void {
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }
}
