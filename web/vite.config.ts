// How the pages are built: relative addresses, so that they work under any path, and the 3-D scene as a chunk of its own,
// fetched only when it is drawn. While developing, calls go to a `tokenwright explore --port 8321`.

import { defineConfig } from "vite";

const target = "http://127.0.0.1:8321";
const engine = { target, changeOrigin: true, headers: { origin: target } }; // it answers to its own pages alone

export default defineConfig({
  base: "./",
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: true,
    chunkSizeWarningLimit: 800,
    license: { fileName: "licenses.md" }, // of what is bundled: their texts must go with it
    rolldownOptions: { input: ["index.html", "chat.html"] },
  },
  server: {
    host: "127.0.0.1",
    proxy: {
      "^/(status|model|tokenize|detokenize|pages|calculate|bandwidth|beams|batches|runs|v1)([/?].*)?$|^/chat/.*$": {
        ...engine,
        ws: true,
      },
    },
  },
});
