// A server of the TypeScript SDK of both eras, with tools that ask their caller in either way and one that adds a tool.
// Its arguments: the folder of the package `@modelcontextprotocol/server`, and of zod.
const [sdk, zod] = process.argv.slice(2);
const { McpServer, inputRequired } = await import(`${sdk}/dist/index.mjs`);
const { serveStdio } = await import(`${sdk}/dist/stdio.mjs`);
const { z } = await import(`${zod}/index.js`);

const question = {
  mode: 'form',
  message: 'What is your name?',
  requestedSchema: { type: 'object', properties: { value: { type: 'string' } }, required: ['value'] },
};
const text = (value) => ({ content: [{ type: 'text', text: value }] });

serveStdio(() => {
  const server = new McpServer({ name: 'asking', version: '1' });
  const inputSchema = z.object({});
  server.registerTool('ask_at_once', { inputSchema }, async (_, context) => {
    const answer = await context.mcpReq.elicitInput(question);
    return text(`${answer.action} ${answer.content?.value}`);
  });
  server.registerTool('ask', { inputSchema }, async (_, context) => {
    const answer = context.mcpReq.inputResponses?.name;
    if (answer === undefined) return inputRequired({ inputRequests: { name: inputRequired.elicit(question) } });
    return text(`${answer.action} ${answer.content?.value}`);
  });
  server.registerTool('add', { inputSchema }, async () => {
    server.registerTool('found', { inputSchema }, async () => text('here'));
    return text('added');
  });
  return server;
});
