# /// script
# dependencies = ["hermes-agent==0.19.0"]
# [tool.harness]
# dialect = "chat"
# match = "calls"
# trajectories = 2
# because = "it strips the last answer, and the template writes its white space"
# tool = "terminal"
# first = {command = "echo there 2", timeout = 9}
# second = {command = "echo here"}
# ///
mkdir -p ~/.hermes
# It wants 64,000 tokens of context, whatever the model has.
cat >~/.hermes/config.yaml <<END
model: {default: $MODEL, provider: custom, base_url: $OPENAI_BASE_URL, api_key: none, context_length: 65536, max_tokens: 4000}
auxiliary: {compression: {context_length: 65536}}
security: {tirith_enabled: false}
END
more=
for question in "$@"; do
  answer=$(hermes chat --quiet --yolo $more --query "$question") || exit
  more=--continue
done
echo "$answer"
