// /// script
// [tool.harness]
// npm = ["@mastra/core@1.71.0", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"]
// dialect = "chat"
// ///
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Agent } from '@mastra/core/agent'
import { createTool } from '@mastra/core/tools'
import { z } from 'zod'

const look = createTool({
  id: 'look',
  description: 'Look somewhere.',
  inputSchema: z.object({ where: z.string(), times: z.number().default(1) }),
  execute: async ({ where, times }) => `${where}: nothing, ${times} times`
})
const model = createOpenAICompatible({ name: 'router', baseURL: process.env.OPENAI_BASE_URL })(process.env.MODEL)
const agent = new Agent({ id: 'one', name: 'one', instructions: 'You look.', model, tools: { look } })
const messages = []
let answer
for (const question of process.argv.slice(2)) {
  messages.push({ role: 'user', content: question })
  const result = await agent.generate(messages, { maxSteps: 20 })
  answer = result.text
  messages.push(...result.response.messages)
}
console.log(answer)
