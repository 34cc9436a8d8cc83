package main

type dashboard struct {
	uid, title string
	panels     []panel
}

func (d dashboard) file() string { return d.uid + ".json" }

type panel struct {
	title, unit string // unit: one of Grafana's names
	why         string // what to look for
	queries     []query
}

type query struct{ expr, legend string }

func one(expr, legend string) []query { return []query{{expr, legend}} }

// p99 is the 99th percentile of a histogram by labels.
func p99(histogram, by string) string {
	return "histogram_quantile(0.99, sum by (" + by + ", le) (rate(" + histogram + "[$__rate_interval])))"
}

func rate(counter, by string) string {
	return "sum by (" + by + ") (rate(" + counter + "[$__rate_interval]))"
}

var dashboards = []dashboard{
	{uid: "muster-cluster", title: "Muster: cluster", panels: []panel{
		{"Ready replicas", "none", "Replicas whose checks all hold. 0 of a job: no machine can join.", one(`sum by (job) (min by (job, instance) (muster_ready{job=~"muster-(joinservice|kms)"}))`, "{{job}}")},
		{"Checks that do not hold", "none", "1 for each check of a service that does not hold.", one(`1 - muster_ready{job=~"muster-(joinservice|kms)"}`, "{{instance}} {{check}}")},
		{"Settings that weaken the cluster", "none", "1 for each that is in force.", one(`max by (job, reason) (muster_insecure_config)`, "{{job}} {{reason}}")},

		{"Policy in force", "none", "Generation of the AttestationPolicy and serial of the owner. Replicas should agree.", []query{
			{"muster_policy_generation", "generation {{job}} {{instance}}"}, {"max(muster_policy_serial)", "serial"},
		}},
		{"Processor vendors' data", "s", "How long each part of the policy's collateral is valid. At 0, hardware reports that need it are refused.", one(`min by (part) (muster_collateral_end_seconds) - time()`, "{{part}}")},
		{"Newest policy refused", "none", "1 while it is; the reason is in the legend.", one(`max by (reason) (muster_policy_rejected)`, "{{reason}}")},
		{"Connections that were set up", "cps", "By side and outcome.", one(rate("muster_atls_setups_total", "side, outcome"), "{{side}} {{outcome}}")},

		{"Refused machines", "cps", "By reason: POLICY_REFUSED after an image changed, EK_UNTRUSTED for another make of TPM; others deserve a look at once.", one(rate(`muster_atls_setups_total{side="server",outcome="refused"}`, "reason"), "{{reason}}")},
		{"Tickets", "cps", "By role and outcome.", one(rate("muster_join_tickets_total", "role, reason"), "{{role}} {{reason}}")},
		{"Tickets given back", "cps", "By outcome.", one(rate("muster_join_returns_total", "reason"), "{{reason}}")},
		{"Keys for machines that rebooted", "cps", "By role and outcome. DISK_MISMATCH and NAME_TAKEN: a disk was moved.", one(rate("muster_rejoin_tickets_total", "role, reason"), "{{role}} {{reason}}")},
		{"Turns of control planes", "cps", "Renewals and ends, by outcome.", one(rate("muster_join_lease_renewals_total", "reason"), "{{reason}}")},

		{"Time of a ticket, 99th percentile", "s", "Stages of a ticket; total is what the machine waits.", one(p99("muster_join_stage_seconds_bucket", "stage"), "{{stage}}")},
		{"Time of a set-up, 99th percentile", "s", "The exchange of evidence has a limit of 10 s.", one(p99(`muster_atls_setup_seconds_bucket{side="server"}`, "part"), "{{part}}")},
		{"Time of a call, 99th percentile", "s", "", one(p99("muster_rpc_duration_seconds_bucket", "procedure"), "{{procedure}}")},

		{"Calls", "reqps", "By procedure, code and reason.", one(rate("muster_rpc_requests_total", "procedure, code, reason"), "{{procedure}} {{code}} {{reason}}")},
		{"Key service", "reqps", "WORKLOAD_IDENTITY and WORKLOAD_NODE: a client other than joinservice asks.", one(rate("muster_kms_calls_total", "purpose, reason"), "{{purpose}} {{reason}}")},
		{"Requests of kubelets for certificates", "reqps", "Approved, denied, or waiting.", one(rate("muster_node_certificate_requests_total", "signer, reason"), "{{signer}} {{reason}}")},

		{"Connections closed before TLS", "cps", "source_…: one address; the others: too many in all.", one(rate("muster_atls_dropped_total", "cause"), "{{cause}}")},
		{"Refusals that are not in the audit log", "cps", "Counted only, since there were too many.", one(rate("muster_refusals_unrecorded_total", "instance"), "{{instance}}")},
		{"Memory", "bytes", "Resident memory of each process.", one(`process_resident_memory_bytes{job=~"muster-.+"}`, "{{job}} {{instance}}")},
		{"Reports of orders", "cps", "What machines report of their owner's orders.", one(rate("muster_order_reports_total", "state"), "{{state}}")},
	}},
	{uid: "muster-nodes", title: "Muster: nodes", panels: []panel{
		{"Age of the last verdict", "s", "Five minutes are usual; from 15 on, certificates are not renewed.", one(`time() - (muster_reattestation_last_success_timestamp_seconds > 0)`, "{{instance}}")},
		{"Re-attestations", "cps", "By outcome.", one(rate("muster_reattestations_total", "instance, reason"), "{{instance}} {{reason}}")},
		{"Time left of certificates", "s", "The kubelet renews its own when 10 to 30 % are left.", one(`muster_certificate_not_after_timestamp_seconds - time()`, "{{instance}} {{certificate}}")},

		{"Age of the newest backup", "s", "Of control planes with a schedule. Above the interval: none is made any more.", []query{
			{"time() - (muster_backup_timestamp_seconds > 0)", "{{instance}}"}, {"muster_backup_interval_seconds > 0", "interval {{instance}}"},
		}},
		{"Size of the newest backup", "bytes", "On control planes.", one("muster_backup_size_bytes > 0", "{{instance}}")},
		{"Share left of certificates", "percentunit", "", one(`(muster_certificate_not_after_timestamp_seconds - time()) / (muster_certificate_not_after_timestamp_seconds - muster_certificate_not_before_timestamp_seconds)`, "{{instance}} {{certificate}}")},
		{"Requests to attesters", "reqps", "Other reasons than ACCEPTED and BUSY: the TPM or its driver.", one(rate("muster_attester_requests_total", "instance, purpose, reason"), "{{instance}} {{purpose}} {{reason}}")},
		{"Time of an attester's answer, 99th percentile", "s", "The wait for the TPM included.", one(p99("muster_attester_request_seconds_bucket", "instance, purpose"), "{{instance}} {{purpose}}")},

		{"Time of a quote, 99th percentile", "s", "", one(p99("muster_quote_seconds_bucket", "instance, purpose"), "{{instance}} {{purpose}}")},
		{"Checks of attesters that do not hold", "none", "", one(`1 - muster_ready{job="muster-attester"}`, "{{instance}} {{check}}")},
		{"Nodes that are refused", "none", "Enrolled, not banned, and the machine's last evidence was refused.", one(`max by (reason) (muster_nodes_refused)`, "{{reason}}")},
		{"Nodes that were cloned", "none", "A second machine has shown their TPM: muster status has both addresses.", one(`max(muster_nodes_cloned)`, "cloned")},
		{"Nodes that vanished", "none", "Enrolled, and no sign of life: never came, Node gone, machine silent.", one(`max by (how) (muster_nodes_vanished)`, "{{how}}")},
		{"Phase of machines that bootstrap", "none", "A machine that is a node has no bootstrapper any more.", one(`muster_bootstrap_phase == 1`, "{{instance}} {{phase}}")},

		{"Machines that are locked", "none", "1 once an init or a join has taken the node lock.", one(`muster_node_locked`, "{{instance}}")},
		{"Tries to join", "cps", "By outcome.", one(rate("muster_join_attempts_total", "instance, reason"), "{{instance}} {{reason}}")},
		{"Tries to unlock the state disk", "cps", "By outcome, of machines that wait in the initramfs. Another reason than ACCEPTED: look at the machine's console.", one(rate("muster_unlock_attempts_total", "instance, reason"), "{{instance}} {{reason}}")},
		{"Files changed on the state disk", "none", "Removed or rewritten at the start, since the cluster does not list them. Above 0: an intruder was root on that node.", one(`muster_state_disk_findings`, "{{instance}}")},
		{"Tries to init", "cps", "By outcome; INIT_SECRET_INVALID: a client guesses.", one(rate("muster_init_attempts_total", "instance, reason"), "{{instance}} {{reason}}")},
		{"Recoveries", "cps", "By outcome; RECOVERY_SECRET_INVALID: wrong files, or a client guesses.", one(rate("muster_recovery_attempts_total", "instance, reason"), "{{instance}} {{reason}}")},
	}},
}
