// Pictures of a message, by a button, by paste and by drop: their files as data: URLs, which the server reads within its
// own limits.

import { signal } from "@preact/signals";

const MOST = 12 << 20; // bytes of a file: a request has them in base64

export const attached = signal<string[]>([]); // of the message that is being written
export const refused = signal(""); // why a file was not attached

export async function attach(files: Iterable<File>): Promise<void> {
  for (const file of files) {
    if (!file.type.startsWith("image/")) refused.value = `${file.name} is no picture.`;
    else if (file.size > MOST) refused.value = `${file.name} has more than ${MOST >> 20} MB.`;
    else {
      refused.value = "";
      const url = await urlOf(file);
      attached.value = [...attached.value, url];
    }
  }
}

export const detach = (at: number): string[] => (attached.value = attached.value.filter((_, place) => place !== at));

/** The pictures that go with the message, which are attached no longer. */
export function taken(): string[] {
  const found = attached.value;
  attached.value = [];
  return found;
}

const urlOf = (file: File): Promise<string> =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
