import { describe, expect, it } from "vitest";
import { Cell } from "../stage/renderers/renderer";
import { Run } from "./run";
import { SceneBuilder } from "../stage/scene";
import { frame, model, runCard, tokens } from "./samples";

const run = (): Run => new Run(model, runCard(tokens("Once", " upon"), "Once upon"), "live");

describe("Run", () => {
  it("appends frames in order, passes over those it knows and refuses gaps", () => {
    const text = run();
    expect(text.push(frame({ step: 0 }))).toBe("new");
    expect(text.push(frame({ step: 0 }))).toBe("known");
    expect(text.push(frame({ step: 2 }))).toBe("gap");
    expect(text.next).toBe(1);
  });

  it("sums what the frames say", () => {
    const text = run();
    text.push(frame({ step: 0, length: 2, flops: 2n ** 60n, step_us: 5 }));
    text.push(frame({ step: 1, length: 1, flops: 1n, step_us: 7 }));
    expect(text.totals[1]).toMatchObject({ forward_tokens: 3, flops: 2n ** 60n + 1n, step_us: 12 });
    expect(text.totals[0]).toMatchObject({ forward_tokens: 2 });
  });

  it("grows by the tokens that were chosen, not by parts of a prompt", () => {
    const text = run();
    text.push(frame({ step: 0, token: null, seq_len: 2 }));
    expect(text.tokens.length).toBe(2);
    text.label(tokens(" a", " time"));
    text.push(frame({ step: 1, token: 1, seq_len: 3, text: " time" }));
    expect(text.written()).toEqual([1]);
    expect(text.pieces.join("")).toBe("Once upon time");
  });
});

describe("SceneBuilder", () => {
  it("says of each cell what the step did with it", () => {
    const text = run();
    text.push(frame({ step: 0, start: 0, length: 2, seq_len: 3, token: 0 }));
    text.push(frame({ step: 1, start: 2, length: 1, seq_len: 4, token: 0 }));
    text.push(frame({ step: 2, start: 0, length: 4, recomputed: 3, seq_len: 5, token: 0, cache: false }));
    const builder = new SceneBuilder();
    const column = (index: number) => {
      const { cells, layers } = builder.build(text, index, null, 0, false);
      return Array.from({ length: cells.length / layers }, (_, i) => cells[i * layers]);
    };
    const { empty, kept, fresh, recomputed, shared } = Cell;
    expect(column(-1)).toEqual([empty, empty]);
    expect(column(0)).toEqual([fresh, fresh, empty]);
    expect(column(1)).toEqual([kept, kept, fresh, empty]);
    expect(column(2)).toEqual([recomputed, recomputed, recomputed, fresh, empty]);
    expect(column(0)).toEqual([fresh, fresh, empty]); // what was shown can be shown again
    text.shared.value = 1;
    expect(column(1)).toEqual([shared, kept, fresh, empty]);
    expect(column(2)).toEqual([recomputed, recomputed, recomputed, fresh, empty]);
  });

  it("lets a column fall when it leaves a window, and only in that step; sinks stay", () => {
    const text = run();
    text.push(frame({ step: 0, start: 0, length: 2, seq_len: 3, token: 0 }));
    text.push(frame({ step: 1, start: 2, length: 1, seq_len: 4, token: 0 }));
    const column = (index: number, sinks: number, tried = false) => {
      const kept = { windows: Array(model.layers).fill(1) as number[], sinks, thin: 1, tried };
      const { cells, layers } = new SceneBuilder().build(text, index, null, 0, false, kept);
      return Array.from({ length: cells.length / layers }, (_, i) => cells[i * layers]);
    };
    const { empty, kept, fresh, left } = Cell;
    expect(column(0, 0)).toEqual([left, fresh, empty]);
    expect(column(1, 0)).toEqual([empty, left, fresh, empty]);
    expect(column(1, 1)).toEqual([kept, left, fresh, empty]);
    expect(column(1, 0, true)).toEqual([left, left, fresh, empty]);
  });

  it("gives the layers the share of the time that had passed when each was done", () => {
    const text = run();
    text.push(
      frame({
        step: 0,
        layers: [
          { attention_us: 1, mlp_us: 2 },
          { attention_us: 3, mlp_us: 4 },
        ],
      }),
    );
    expect([...new SceneBuilder().build(text, 0, null, 0, false).layerShare]).toEqual([Math.fround(0.3), 1]);
  });

  it("decodes a row", () => {
    const text = run();
    text.push(frame({ step: 0 }));
    const row = { layer: 1, head: 0, argmax: 0, codes: Uint8Array.of(255, 0, 128) };
    const weights = new SceneBuilder().build(text, 0, row, 1, false).row?.weights;
    expect([...(weights ?? [])]).toEqual([1, 0, Math.fround((128 / 255) ** 2)]);
  });
});
