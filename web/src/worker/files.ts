// The engine's files, of which each name has its content's hash: fetched once and kept in a cache of this origin, from
// which later visits read them, also without a network. Bytes are counted as they come over the network, compressed.

/** A file as scripts/site writes it; all but programs are compressed by gzip. bytes: as it is transferred. */
export interface Packed {
  name: string;
  bytes: number;
}

/** What scripts/site writes to files.json, with names relative to the folder. */
export interface Manifest {
  pyodide: string; // a folder of programs, which import each other by their names
  programs: Packed[];
  runtime: Record<string, Packed>; // by the names that Pyodide asks for
  archives: Packed[]; // zip files of Python's
  course: Packed; // one more, for visitors that open the course
  model: Packed & { path: string }; // of weight_planes.py
  kernels: { relaxed: Packed; exact: Packed };
}

const CACHE = "tokenwright-engine"; // as web/site/sw.js

export class Files {
  private constructor(
    private readonly folder: string,
    readonly manifest: Manifest,
    private readonly kept: Cache | null, // null: this browser keeps nothing for this address
    private readonly counted: (bytes: number) => void,
  ) {}

  static async open(folder: string, counted: (bytes: number) => void): Promise<Files> {
    const kept = "caches" in self ? await caches.open(CACHE).catch(() => null) : null;
    const url = `${folder}files.json`;
    const answer = await fetched(url);
    await kept?.put(url, answer.clone()).catch(() => undefined);
    return new Files(folder, (await answer.json()) as Manifest, kept, counted);
  }

  /** A file as it is transferred. */
  private async transferred({ name }: Packed): Promise<Blob> {
    const url = this.folder + name;
    const found = await this.kept?.match(url);
    if (found !== undefined) {
      const blob = await found.blob();
      this.counted(blob.size);
      return blob;
    }
    const parts: BlobPart[] = [];
    const reader = (await fetched(url)).body!.getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      parts.push(part.value as BlobPart);
      this.counted(part.value.length);
    }
    const type = name.endsWith("js") ? "text/javascript" : "application/octet-stream"; // a program must have its own
    const blob = new Blob(parts, { type });
    await this.kept?.put(url, new Response(blob)).catch(() => undefined); // no room: it works without
    return blob;
  }

  /** A file's content. type: of the answer, where one asks as of a server. */
  async unpacked(file: Packed, type = "application/octet-stream"): Promise<Response> {
    const stream = (await this.transferred(file)).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream, { headers: { "content-type": type } });
  }

  async bytes(file: Packed): Promise<Uint8Array> {
    return new Uint8Array(await (await this.unpacked(file)).arrayBuffer());
  }

  /** Keeps the programs for visits without a network: the browser itself fetches what is imported. */
  async keepPrograms(): Promise<void> {
    await Promise.all(this.manifest.programs.map((program) => this.transferred(program)));
  }

  /** Forgets files of other versions of this site. */
  async forgetOthers(): Promise<void> {
    const { programs, runtime, archives, course, model, kernels } = this.manifest;
    const own = [...programs, ...Object.values(runtime), ...archives, course, model, ...Object.values(kernels)];
    const names = new Set([...own.map(({ name }) => this.folder + name), `${this.folder}files.json`]);
    for (const { url } of (await this.kept?.keys()) ?? [])
      if (url.startsWith(this.folder) && !names.has(url)) await this.kept?.delete(url);
  }
}

async function fetched(url: string): Promise<Response> {
  const found = await fetch(url);
  if (!found.ok) throw new Error(`${url} is missing (${found.status})`);
  return found;
}
