// A model that a visitor brings, and K and V of conversations: in files of this origin that no other page can read, and
// that stay until the visitor removes them. Nothing is sent anywhere.

const MODEL = "tokenwright-model";
const KV = "tokenwright-kv";
const COMPLETE = "complete"; // written last: a copy that was interrupted has none

const root = (): Promise<FileSystemDirectoryHandle> => navigator.storage.getDirectory();

/** The files of the model that was kept; none: the page's own model runs. */
export async function kept(): Promise<File[]> {
  try {
    const folder = await (await root()).getDirectoryHandle(MODEL);
    await folder.getFileHandle(COMPLETE);
    const files: File[] = [];
    for await (const one of folder.values())
      if (one.kind === "file" && one.name !== COMPLETE) files.push(await one.getFile());
    return files;
  } catch {
    return []; // no such folder, or no such storage
  }
}

/** Copies files here. counted: bytes, as they are written. */
export async function keep(files: File[], counted: (bytes: number) => void): Promise<void> {
  await forget();
  const folder = await (await root()).getDirectoryHandle(MODEL, { create: true });
  for (const file of files) {
    const target = await (await folder.getFileHandle(file.name, { create: true })).createWritable();
    const count = new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>({
      transform(part, control) {
        counted(part.length);
        control.enqueue(part);
      },
    });
    await file.stream().pipeThrough(count).pipeTo(target);
  }
  await folder.getFileHandle(COMPLETE, { create: true });
}

export async function forget(): Promise<void> {
  await (await root()).removeEntry(MODEL, { recursive: true }).catch(() => undefined);
}

/** The folder of K and V; null where this browser has none. */
export async function kv(): Promise<FileSystemDirectoryHandle | null> {
  try {
    return await (await root()).getDirectoryHandle(KV, { create: true });
  } catch {
    return null;
  }
}
