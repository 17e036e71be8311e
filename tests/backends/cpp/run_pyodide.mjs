// Runs a Python program with the package and its WebAssembly kernels: node run_pyodide.mjs PYODIDE ROOT LIBRARY PROGRAM
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, root, library, program] = process.argv.slice(2).map((path) => resolve(path));
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide({ indexURL: `${folder}/`, stdout: (line) => console.log(line) });
await python.loadPackage("numpy", { messageCallback() {} });
for (const place of ["/source", "/packages/tokenwright/backends/native"]) python.FS.mkdirTree(place);
python.FS.mount(python.FS.filesystems.NODEFS, { root }, "/source");
python.FS.writeFile("/packages/tokenwright/backends/native/_native.so", readFileSync(library));
python.runPython(`
import sys
sys.dont_write_bytecode = True
sys.path[:0] = ["/source/src", "/source/web/python"]
import tokenwright
tokenwright.__path__.insert(0, "/packages/tokenwright")  # the kernels of this platform before those of another
`);
try {
  python.runPython(readFileSync(program, "utf8"));
} catch (error) {
  console.error(error.message); // without Pyodide's own code around it
  process.exitCode = 1;
}
