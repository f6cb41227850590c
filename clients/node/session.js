// Runs one multi-round session against an AMPD coordinator and prints each round as JSON.
//
//   node session.js [ADDRESS] [ROUNDS]
//
// Everything it knows of AMPD comes from protos/ampd/v1.
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const [address = '127.0.0.1:7070', rounds = '3'] = process.argv.slice(2);

const definition = protoLoader.loadSync('ampd/v1/session_service.proto', {
  includeDirs: [PROTOS],
  keepCase: true,
  enums: String,
  longs: Number,
  defaults: true,
  oneofs: true,
});
const { ampd } = grpc.loadPackageDefinition(definition);
const sessions = new ampd.v1.SessionService(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set('ampd-tenant', 'node');

const call = (method, request) =>
  new Promise((resolve, reject) =>
    sessions[method](request, metadata, { deadline: Date.now() + 10_000 }, (error, response) =>
      error ? reject(error) : resolve(response),
    ),
  );

function runRound(sessionId, content) {
  return new Promise((resolve, reject) => {
    const round = { text: '', tokens: 0 };
    const stream = sessions.Generate(
      {
        session_id: sessionId,
        messages: { messages: [{ role: 'user', content }] },
        sampling: { max_tokens: 12, temperature: 0 },
      },
      metadata,
      { deadline: Date.now() + 120_000 },
    );
    stream.on('data', ({ event, placed, tokens, finished }) => {
      if (event === 'placed') Object.assign(round, { route: placed.route, reason: placed.reason });
      if (event === 'tokens') {
        round.text += tokens.text;
        round.tokens += tokens.token_ids.length;
      }
      if (event === 'finished') {
        round.finish_reason = finished.finish_reason;
        round.history_tokens = finished.history_tokens;
      }
    });
    stream.on('error', reject);
    stream.on('end', () => resolve(round));
  });
}

try {
  const { session } = await call('CreateSession', { labels: { client: 'node' } });
  for (let index = 0; index < Number(rounds); index += 1) {
    const round = await runRound(session.session_id, `Question ${index}: what is ${index} + 2?`);
    console.log(JSON.stringify({ round: index, ...round }));
  }
  await call('CloseSession', { session_id: session.session_id });
} catch (error) {
  console.error(`${error.code ?? ''} ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  sessions.close();
}
