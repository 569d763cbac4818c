# /// script
# [tool.harness]
# npm = ["@github/copilot@1.0.102"]
# dialect = "chat"
# trajectories = 2
# because = "a resume leaves the names of all tools out of what the call of an unknown one was answered"
# tool = "bash"
# first = {command = "echo there 2", description = "Looks"}
# second = {command = "echo here", description = "Looks"}
# ///
export COPILOT_PROVIDER_BASE_URL=$OPENAI_BASE_URL COPILOT_PROVIDER_API_KEY=none COPILOT_MODEL=$MODEL COPILOT_OFFLINE=true
more=
for question in "$@"; do
  answer=$(copilot -p "$question" $more --allow-all --no-color --silent) || exit
  more=--continue
done
echo "$answer"
