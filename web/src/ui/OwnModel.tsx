// The offer to run a visitor's own model: what it takes, and what happens with it.

import { accept, copied, offer } from "../visit/own-model";
import { bytes, count, joined, plural } from "./format";

export function OwnModel() {
  const wanted = offer.value;
  if (wanted === null) return null;
  const [file, weights, kv] = [wanted.bytes, wanted.weights, wanted.kv].map((size) => joined(bytes(size)));
  return (
    <section class="banner calm" aria-label="Your own model">
      <p>
        <b>{wanted.name}</b> has {file} and {plural(wanted.layers, "layer")}. In memory it takes {weights} for its
        weights and {kv} for K and V of {count(wanted.tokens)} tokens. It is kept in this browser alone; nothing is
        sent.
      </p>
      {copied.value === null ? (
        <>
          <button type="button" onClick={() => void accept()}>
            Run it here
          </button>
          <button type="button" class="quiet" onClick={() => (offer.value = null)}>
            Not now
          </button>
        </>
      ) : (
        <progress value={copied.value} max={1} aria-label="Keeping the model" />
      )}
    </section>
  );
}
