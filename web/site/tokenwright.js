// The stage in an article of any site: <script src="https://.../tokenwright.js" defer></script> once, and where it stands
//
//   <tokenwright-stage prompt="Once upon a time" cache="off" seed="1" tokens="40" height="560"></tokenwright-stage>
//
// Until a reader presses the button it is a still picture, and nothing but this file is fetched. Then the page of this
// folder runs in a frame of its own origin: its sandbox keeps it from the article, its address, new windows and forms.
{
  const HOME = new URL(".", document.currentScript.src);
  const [WORDS, LAYERS] = [14, 6]; // of the picture: columns of the cache, and cells in each

  const STYLE = `
    :host { display: block; min-width: 280px; margin: 1em 0; }
    .still, iframe { box-sizing: border-box; width: 100%; height: 100%; border: 1px solid #2a323d; border-radius: 8px; }
    .still { display: grid; grid-template-rows: 1fr auto; background: #0c0f14; color: #e8edf2; overflow: hidden;
      font: 15px/1.45 system-ui, sans-serif; }
    svg { width: 100%; height: 100%; min-height: 0; }
    .words { padding: 12px 16px 16px; }
    p { margin: 0 0 10px; overflow-wrap: anywhere; }
    .prompt { font-family: ui-monospace, monospace; color: #f2b441; }
    button { font: inherit; color: #0c0f14; background: #f2b441; border: 0; border-radius: 6px; padding: 8px 14px; cursor: pointer; }
    button:focus-visible { outline: 3px solid #4a9fdc; outline-offset: 2px; }`;

  /** Columns for tokens and cells for layers: kept in blue, the newest written in green; without the cache all outlines. */
  const picture = (cached) => {
    let cells = "";
    for (let word = 0; word < WORDS; word++)
      for (let layer = 0; layer < LAYERS; layer++) {
        const colour = !cached ? "none" : word === WORDS - 1 ? "#5fbf77" : "#2f6f9f";
        cells += `<rect x="${word * 22 + 10}" y="${layer * 18 + 12}" width="18" height="14" rx="2" fill="${colour}" stroke="${cached ? "none" : "#c9573b"}"/>`;
      }
    const what = cached ? "K and V of each token, kept for every layer" : "every token computed again for every layer";
    return `<svg viewBox="0 0 ${WORDS * 22 + 16} ${LAYERS * 18 + 22}" role="img" aria-label="${what}">${cells}</svg>`;
  };

  customElements.define(
    "tokenwright-stage",
    class extends HTMLElement {
      connectedCallback() {
        if (this.shadowRoot) return;
        const root = this.attachShadow({ mode: "closed" });
        const cached = this.getAttribute("cache") !== "off";
        root.innerHTML = `<style>${STYLE}</style><div class="still">${picture(cached)}<div class="words"><p class="prompt"></p>
          <p>${cached ? "With the KV cache each step computes one token." : "Without the KV cache each step computes all tokens again."}</p>
          <button type="button">Run the model here</button> <small>17 MB, once</small></div></div>`;
        const prompt = this.getAttribute("prompt") ?? "Once upon a time";
        root.querySelector(".prompt").textContent = prompt;
        root.host.style.height = `${Math.max(360, Number(this.getAttribute("height")) || 560)}px`;
        root.querySelector("button").addEventListener("click", () => this.run(root, prompt, cached));
      }

      run(root, prompt, cached) {
        const link = new URLSearchParams({ embed: "1", p: prompt, n: this.getAttribute("tokens") ?? "40" });
        link.set("seed", this.getAttribute("seed") ?? "1");
        if (!cached) link.set("cache", "off");
        const frame = document.createElement("iframe");
        frame.title = "Tokenwright: a language model, running in this frame";
        frame.sandbox = "allow-scripts allow-same-origin allow-downloads"; // its own origin, which is not the article's
        frame.referrerPolicy = "no-referrer";
        frame.src = `${HOME}#${String(link).replaceAll("+", "%20")}`;
        root.querySelector(".still").replaceWith(frame);
        frame.focus();
      }
    },
  );
}
