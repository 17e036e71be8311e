// Runs a WebAssembly program of WASI under Node: node run_wasm.mjs PROGRAM
import { readFile } from "node:fs/promises";
import { WASI } from "node:wasi";

const wasi = new WASI({ version: "preview1", args: ["check", "the library within", "wasm"], returnOnExit: true });
const program = await WebAssembly.compile(await readFile(process.argv[2]));
const instance = await WebAssembly.instantiate(program, wasi.getImportObject());
process.exitCode = wasi.start(instance);
