# Schedules of a Timebell server as Terraform resources, through its HTTP API.
#
#   export TIMEBELL_URL=https://timebell.example.com TIMEBELL_API_KEY=...       (a key of the role editor)
#   terraform init && terraform apply
#
# Needs only Terraform and curl. The key stays in the environment, and is not stored in the state. Terraform applies what
# is in this file; it does not see changes that were made elsewhere.
terraform {
  required_version = ">= 1.4"
}

locals {
  # Bodies of PUT /schedules/by-name/{name} by name.
  schedules = {
    nightly-report = {
      cronExpression = "30 2 * * *"
      timezone       = "Europe/Berlin"
      topic          = "reports.build"
    }
    digest = {
      cronExpression = "0 9 * * 1-5"
      timezone       = "America/New_York"
      topic          = "digest.send"
      overlapPolicy  = "queue"
    }
  }
}

# Deletes the schedule when its name disappears from the map.
resource "terraform_data" "schedule" {
  for_each = local.schedules
  input    = each.key

  provisioner "local-exec" {
    when        = destroy
    command     = "${path.module}/schedule.sh delete"
    environment = { NAME = self.input }
  }
}

# Creates or replaces the schedule when its body changes.
resource "terraform_data" "body" {
  for_each         = local.schedules
  triggers_replace = each.value

  provisioner "local-exec" {
    command     = "${path.module}/schedule.sh put"
    environment = { NAME = terraform_data.schedule[each.key].output, BODY = jsonencode(each.value) }
  }
}
