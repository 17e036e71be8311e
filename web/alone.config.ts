// Builds alone.html: the explorer as one file, into which a trace is put where the element of id "trace" stands. It has
// everything in it, and its policy lets it fetch nothing, so it plays in a notebook, from a disk and without a network.

import { type Plugin, defineConfig } from "vite";

const POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";

// Catalogues are fetched by addresses, which a page without one cannot make.
const english: Plugin = {
  name: "english",
  enforce: "pre",
  load: (id) => (id.endsWith(".json?url") ? 'export default ""' : null),
};

export default defineConfig({
  base: "./",
  publicDir: false,
  plugins: [english, oneFile()],
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: false, // the pages are in it
    modulePreload: false,
    cssCodeSplit: false,
    chunkSizeWarningLimit: 2000,
    license: { fileName: "licenses.md" },
    rolldownOptions: { input: "index.html", output: { codeSplitting: false } },
  },
});

function oneFile(): Plugin {
  return {
    name: "one-file",
    enforce: "post",
    generateBundle: {
      order: "post", // after the licences
      handler(_, bundle) {
        let [page, script, style, licences] = ["", "", "", ""];
        for (const [name, file] of Object.entries(bundle)) {
          if (file.type === "chunk") script += file.code;
          else if (name.endsWith(".html")) page = String(file.source);
          else if (name.endsWith(".css")) style += String(file.source);
          else if (name.endsWith(".md")) licences = String(file.source);
          delete bundle[name];
        }
        const head = `<meta http-equiv="Content-Security-Policy" content="${POLICY}" /><style>${style}</style>`;
        const code = `<script type="module">${script.replaceAll("</script", "<\\/script")}</script>`;
        const slot = '<script type="application/json" id="trace"></script>';
        const notes = `<!--\n${licences.replaceAll("--", "- -")}\n-->`;
        const source = page
          .replace(/<script type="module"[^>]*><\/script>/, "")
          .replace(/<link rel="stylesheet"[^>]*>/, "")
          .replace('<meta charset="utf-8" />', (charset) => charset + head)
          .replace("</body>", () => `${slot}${code}${notes}</body>`);
        this.emitFile({ type: "asset", fileName: "alone.html", source });
      },
    },
  };
}
