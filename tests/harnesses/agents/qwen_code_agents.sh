# /// script
# [tool.harness]
# of = "qwen_code"
# scene = "agents"
# asks_on = true
# beside = "You look under tables."
# then = {name = "agent", arguments = {description = "Looks", prompt = "Look under the table.", subagent_type = "looker"}}
# ///
export OPENAI_MODEL=$MODEL
mkdir -p .qwen/agents
echo '{"model": {"generationConfig": {"samplingParams": {"max_tokens": 4000}}}}' >.qwen/settings.json
printf -- '---\nname: looker\ndescription: Looks under tables\n---\nYou look under tables.\n' >.qwen/agents/looker.md
qwen -p "$1" --auth-type openai --yolo
