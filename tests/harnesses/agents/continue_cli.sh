# /// script
# [tool.harness]
# npm = ["@continuedev/cli@1.5.47"]
# dialect = "chat"
# tool = "Bash"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# ///
cat >config.yaml <<END
name: one
version: 1.0.0
schema: v1
models:
  - {name: $MODEL, model: $MODEL, provider: openai, apiBase: $OPENAI_BASE_URL, apiKey: none, roles: [chat], capabilities: [tool_use]}
END
more=
for question in "$@"; do
  answer=$(cn --config config.yaml --auto -p $more "$question") || exit
  more=--resume
done
echo "$answer"
