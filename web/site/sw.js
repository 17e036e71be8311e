// The page without a network, after its first visit: a service worker beside index.html of a site that scripts/site
// builds, which writes VERSION and PAGE, the page's files, before this. The engine's files are named by their content
// and put into their cache by the page's worker (web/src/worker/files.ts). Nothing but this folder is asked.

const OWN = `tokenwright-page-${VERSION}`;
const ENGINE = "tokenwright-engine";
const HASHED = /-[\w-]{8,}\.\w+$|\/pyodide-[0-9a-f]+\//; // a name with its content's hash: never another content

self.addEventListener("install", (event) => {
  const files = PAGE.map((name) => new Request(name, { cache: "no-cache" }));
  event.waitUntil(
    caches
      .open(OWN)
      .then((cache) => cache.addAll(files))
      .then(() => self.skipWaiting()),
  );
});

self.addEventListener("activate", (event) => {
  const old = (name) => name.startsWith("tokenwright-page-") && name !== OWN;
  const cleared = caches.keys().then((names) => Promise.all(names.filter(old).map((name) => caches.delete(name))));
  event.waitUntil(cleared.then(() => self.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && request.url.startsWith(self.registration.scope)) event.respondWith(answer(request));
});

/** The kept file where its name says that it is the same, or where there is no network. */
async function answer(request) {
  const kept = async () => {
    for (const name of [OWN, ENGINE]) {
      const found = await (await caches.open(name)).match(named(request), { ignoreSearch: true });
      if (found) return found;
    }
  };
  if (HASHED.test(new URL(request.url).pathname)) return (await kept()) ?? fetch(request);
  try {
    return await fetch(request);
  } catch (error) {
    const found = await kept();
    if (found) return found;
    throw error;
  }
}

/** A folder's address is that of its index.html, also without its slash. */
function named(request) {
  const url = new URL(request.url);
  if (/\/(chat)?$/.test(url.pathname)) url.pathname = `${url.pathname.replace(/\/$/, "")}/index.html`;
  return url;
}
