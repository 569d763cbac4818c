# /// script
# [tool.harness]
# npm = ["@qwen-code/qwen-code@0.24.4"]
# dialect = "chat"
# marks = '"name": "agent"'
# trajectories = 2
# because = "a resume writes the first message of the user anew: [resumed-first-message](../findings/resumed-first-message.sh)"
# tool = "run_shell_command"
# first = {command = "echo there 2", is_background = false}
# second = {command = "echo here", is_background = false}
# ///
export OPENAI_MODEL=$MODEL
mkdir -p .qwen
echo '{"model": {"generationConfig": {"samplingParams": {"max_tokens": 4000}}}}' >.qwen/settings.json
more=
for question in "$@"; do
  answer=$(qwen -p "$question" $more --auth-type openai --yolo) || exit
  more=--continue
done
echo "$answer"
