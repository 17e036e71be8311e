// Pictures of a message, in a row; before it is sent each can be taken out.

export function Pictures({ urls, remove }: { urls: string[]; remove?: (at: number) => void }) {
  if (urls.length === 0) return null;
  return (
    <ul class="attached" aria-label="Pictures">
      {urls.map((url, at) => (
        <li key={at}>
          <img src={url} alt={`picture ${at + 1}`} />
          {remove && (
            <button type="button" class="quiet" aria-label={`Remove picture ${at + 1}`} onClick={() => remove(at)}>
              ×
            </button>
          )}
        </li>
      ))}
    </ul>
  );
}
