// The few pictures of the page, drawn on a grid of 16.

const PATHS = {
  play: "M4 2.5v11l9-5.5z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  first: "M3 3h2v10H3zM13 3v10L6 8z",
  last: "M11 3h2v10h-2zM3 3v10l7-5z",
  back: "M11 3v10L4 8z",
  forward: "M5 3v10l7-5z",
  again: "M8 3a5 5 0 1 0 5 5h-1.8A3.2 3.2 0 1 1 8 4.8V7l4-3-4-3z",
  sun:
    "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM7.3 1h1.4v2.4H7.3zm0 11.6h1.4V15H7.3zM1 7.3h2.4v1.4H1zm11.6 0H15v1.4h-2.4z" +
    "M2.6 3.5l1-1 1.7 1.7-1 1zm8.1 8.1 1-1 1.7 1.7-1 1zM3.6 13.4l-1-1 1.7-1.7 1 1zm8.1-8.1-1-1 1.7-1.7 1 1z",
  moon: "M6.5 2A6 6 0 1 0 14 9.5 4.8 4.8 0 0 1 6.5 2z",
  auto: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zm0 1.6v8.8a4.4 4.4 0 0 1 0-8.8z",
  save: "M7.2 2h1.6v6l2-2 1.1 1.1L8 11 4.1 7.1 5.2 6l2 2zM3 12.4h10V14H3z",
  open: "M2 3.5h4.3l1.4 1.6H14V13H2zm1.6 3.2v4.7h8.8V6.7z",
  link:
    "M6.6 9.4a3 3 0 0 1 0-4.2l2-2a3 3 0 0 1 4.2 4.2l-1 1-1.1-1.1 1-1a1.4 1.4 0 0 0-2-2l-2 2a1.4 1.4 0 0 0 0 2z" +
    "m2.8-2.8a3 3 0 0 1 0 4.2l-2 2a3 3 0 0 1-4.2-4.2l1-1 1.1 1.1-1 1a1.4 1.4 0 0 0 2 2l2-2a1.4 1.4 0 0 0 0-2z",
  help: "M6 6a2 2 0 1 1 2.9 1.8c-.9.5-1.6 1-1.6 2.2h1.5c0-.5.3-.8.9-1.1A3.4 3.4 0 1 0 4.5 6zm1.2 5.2h1.7v1.7H7.2z",
  minus: "M3 7.2h10v1.6H3z",
  plus: "M7.2 3h1.6v4.2H13v1.6H8.8V13H7.2V8.8H3V7.2h4.2z",
  list: "M2.5 3.5h11v1.6h-11zm0 3.7h11v1.6h-11zm0 3.7h11v1.6h-11z",
  dials:
    "M3 4h5.2a2 2 0 0 1 3.6 0H13v1.5h-1.2a2 2 0 0 1-3.6 0H3zm0 6.5h1.2a2 2 0 0 1 3.6 0H13V12H7.8a2 2 0 0 1-3.6 0H3z",
  close: "M4.2 3 8 6.8 11.8 3 13 4.2 9.2 8l3.8 3.8-1.2 1.2L8 9.2 4.2 13 3 11.8 6.8 8 3 4.2z",
} as const;

export function Icon({ name }: { name: keyof typeof PATHS }) {
  return (
    <svg class="icon" viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
      <path d={PATHS[name]} fill="currentColor" fill-rule="evenodd" />
    </svg>
  );
}
