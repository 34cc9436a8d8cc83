package demo

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/internal/intruder"
)

// ticket is what the intruder holds: all of node2's ticket but the private keys.
type ticket struct {
	ca, client, serving string // PEM
	id                  string // hexadecimal
}

func (r *run) refuseTampered(ctx context.Context) error {
	return r.refuseMachine(ctx, driver.Node{Name: "node3", JoinEndpoints: []string{node1Joinservice}, TamperBootstrapper: true}, "a machine with one changed byte in its bootstrapper", "POLICY_REFUSED")
}

func (r *run) refuseForeign(ctx context.Context) error {
	return r.refuseMachine(ctx, driver.Node{Name: "node4", JoinEndpoints: []string{node1Joinservice}, ForeignEK: true}, "a machine whose TPM no listed root certifies", "EK_UNTRUSTED")
}

// refuseMachine boots a machine and waits until the joinservice has refused it with the reason, in the machine's own
// log and in the joinservice's audit record.
func (r *run) refuseMachine(ctx context.Context, n driver.Node, who, reason string) error {
	m, err := r.Lab.AddNode(ctx, n)
	if err != nil {
		return err
	}
	var audit string
	err = until(ctx, func(ctx context.Context) error {
		log, err := os.ReadFile(filepath.Join(m.Log, "muster-bootstrapper.log"))
		if err != nil {
			return err
		}
		if !strings.Contains(string(log), reason) {
			return fmt.Errorf("%s's log does not have %s yet:\n%s", n.Name, reason, tail(string(log), 5))
		}
		records, err := r.audit(ctx)
		if err != nil {
			return err
		}
		for _, rec := range records {
			if rec.Reason == reason && strings.Contains(rec.line, m.Address) {
				audit = rec.line
				return nil
			}
		}
		return fmt.Errorf("the audit record does not have %s yet", reason)
	})
	if err != nil {
		return err
	}
	r.refused(who, reason, "audit record: "+audit)
	// It continues to try, which must change nothing; see unchanged.
	return nil
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

const attacker = "node9"

// node1API is the address that the intruder dials: the API server whose manifest an administrator changes below. The
// load balancer would send half of its requests to node5's, which accepts no token.
const node1API = "192.168.77.11:6443"

// refuseIntruder gives a machine without evidence all of node2's ticket but its keys.
func (r *run) refuseIntruder(ctx context.Context) error {
	if err := r.steal(ctx); err != nil {
		return err
	}
	if _, err := r.Lab.AddNode(ctx, driver.Node{Name: attacker, NoBootstrapper: true}); err != nil {
		return err
	}
	roots, err := os.ReadFile(r.owner("ek-roots.pem"))
	if err != nil {
		return err
	}
	for path, content := range map[string]string{
		"/root/ca.crt": r.ticket.ca, "/root/client.crt": r.ticket.client, "/root/serving.crt": r.ticket.serving, "/root/ek-roots.pem": string(roots),
	} {
		if _, err := r.pipe(ctx, attacker, []byte(content), "sh", "-c", `cat > "$0"`, path); err != nil {
			return err
		}
	}
	if err := r.attempts(ctx, ""); err != nil {
		return err
	}
	return r.kubeadmByCertificate(ctx)
}

// steal reads the parts of a ticket from node2's disk, without the keys that node2 made.
func (r *run) steal(ctx context.Context) error {
	for path, to := range map[string]*string{
		"/etc/kubernetes/pki/ca.crt":                      &r.ticket.ca,
		"/var/lib/kubelet/pki/kubelet-client-current.pem": &r.ticket.client,
		"/var/lib/kubelet/pki/kubelet-server-current.pem": &r.ticket.serving,
	} {
		content, err := r.at(ctx, "node2", "cat", path)
		if err != nil {
			return err
		}
		for rest := []byte(content); ; {
			var b *pem.Block
			if b, rest = pem.Decode(rest); b == nil {
				break
			}
			if b.Type == "CERTIFICATE" {
				*to += string(pem.EncodeToMemory(b))
			}
		}
		if *to == "" {
			return fmt.Errorf("no certificate in node2's %s", path)
		}
	}
	records, err := r.audit(ctx)
	if err != nil {
		return err
	}
	for _, rec := range records {
		if rec.Event == ticketIssued && rec.Node == "node2" {
			r.ticket.id = rec.Ticket
		}
	}
	if r.ticket.id == "" {
		return errors.New("the audit log has no ticket of node2")
	}
	return nil
}

// record is the part of an audit record that the demonstration reads.
type record struct {
	Event  string `json:"event"`
	Node   string `json:"node"`
	Ticket string `json:"ticket"`
	Reason string `json:"reason"`
	line   string
}

// Events of the audit log that record a grant.
const (
	ticketDecided = "ticket decided"
	ticketIssued  = "ticket issued"
)

func (r *run) audit(ctx context.Context) ([]record, error) {
	out, err := r.at(ctx, "node1", "cat", "/var/log/muster/audit.jsonl", "/var/log/muster/audit-refused.jsonl")
	if err != nil {
		return nil, err
	}
	var list []record
	for line := range strings.Lines(out) {
		rec := record{line: line}
		if err := json.Unmarshal([]byte(line), &rec); err != nil {
			return nil, fmt.Errorf("audit record %q: %w", line, err)
		}
		list = append(list, rec)
	}
	return list, nil
}

// attempts runs the intruder's raw requests on the attacker's machine. None may succeed.
func (r *run) attempts(ctx context.Context, token string) error {
	out, err := r.at(ctx, attacker, "/usr/lib/muster-lab/lab", "intruder", "--server", node1API, "--joinservice", node1Joinservice,
		"--ca", "/root/ca.crt", "--certificate", "/root/client.crt", "--serving", "/root/serving.crt", "--ticket", r.ticket.id, "--ek-roots", "/root/ek-roots.pem", "--victim", "node2", "--token", token)
	if err != nil {
		return err
	}
	var list []intruder.Attempt
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return err
	}
	if len(list) == 0 {
		return errors.New("the intruder made no attempt")
	}
	for _, a := range list {
		r.say("%-86s %s", a.What, a.Reason)
		switch {
		case a.In:
			return fmt.Errorf("the intruder got in: %s: %s", a.What, a.Answer)
		case !slices.Contains([]string{"401", "403", "422", "TLS", "SESSION_REQUIRED", "PEER_NOT_ATTESTED"}, a.Reason):
			return fmt.Errorf("%s failed, but was not refused: %s %s", a.What, a.Reason, a.Answer)
		}
	}
	last := list[len(list)-1]
	who := fmt.Sprintf("a machine without evidence, with node2's ticket (%d raw requests)", len(list))
	if token != "" {
		last = list[0]
		if !strings.Contains(last.Answer, "ValidatingAdmissionPolicy") {
			return fmt.Errorf("the token's request for a certificate was refused, but not by Muster's admission policy: %s", last.Answer)
		}
		last.Reason = "ADMISSION"
		who = fmt.Sprintf("the same with kubeadm's bootstrap token (%d raw requests)", len(list))
	}
	r.refused(who, last.Reason, last.Answer)
	return nil
}

const joinByCertificate = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://` + node1API + `", certificate-authority: /root/ca.crt}}]
users: [{name: u, user: {client-certificate: /root/client.crt, client-key: /root/own.key}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

// joinConfiguration gives the certificate of the kubelet, which does not come, a short time, and discovery as long as
// given: where that must succeed, a busy computer may need longer.
func joinConfiguration(discovery, patience string) string {
	return `apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
discovery:
` + discovery + `
nodeRegistration:
  name: ` + attacker + `
  criSocket: unix:///run/containerd/containerd.sock
  ignorePreflightErrors: [SystemVerification]
timeouts: {discovery: ` + patience + `, tlsBootstrap: 10s, kubernetesAPICall: 5m}
`
}

// kubeadmByCertificate runs kubeadm join with node2's certificate and a key of its own.
func (r *run) kubeadmByCertificate(ctx context.Context) error {
	for path, content := range map[string]string{
		"/root/discovery.conf": joinByCertificate,
		"/root/join.yaml":      joinConfiguration("  file: {kubeConfigPath: /root/discovery.conf}\n  tlsBootstrapToken: abcdef.0123456789abcdef", "30s"),
	} {
		if _, err := r.pipe(ctx, attacker, []byte(content), "sh", "-c", `cat > "$0"`, path); err != nil {
			return err
		}
	}
	if _, err := r.at(ctx, attacker, "openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "/root/own.key"); err != nil {
		return err
	}
	said, err := r.kubeadmJoin(ctx, "kubeadm join with node2's certificate and a key of its own")
	if err != nil {
		return err
	}
	if !strings.Contains(said, "private key does not match public key") {
		return fmt.Errorf("kubeadm join failed, but not for want of the key: %s", said)
	}
	r.refused("kubeadm join with node2's certificate and a key of its own", "TLS", said)
	return nil
}

// kubeadmJoin must fail, and returns the line with the error.
func (r *run) kubeadmJoin(ctx context.Context, who string) (said string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Minute)
	defer cancel()
	out, err := r.at(ctx, attacker, "kubeadm", "join", "--config", "/root/join.yaml")
	if err == nil {
		return "", fmt.Errorf("%s got in:\n%s", who, out)
	}
	if ctx.Err() != nil {
		return "", fmt.Errorf("%s did not end: %w", who, err)
	}
	for line := range strings.Lines(err.Error()) {
		if strings.HasPrefix(line, "error") {
			said = strings.TrimSpace(line)
			break
		}
	}
	return said, nil
}

// bootstrapToken is the one that kubeadm's documents use.
const bootstrapToken = "abcdef.0123456789abcdef"

// refuseToken adds by hand what Muster's init left out: kubeadm's bootstrap token, its bindings, and the API server's
// switch. The admission policies still refuse the intruder. Then it restores everything.
func (r *run) refuseToken(ctx context.Context) error {
	if err := r.admin(ctx,
		[]string{"kubeadm", "init", "phase", "bootstrap-token", "--kubeconfig", adminConf},
		[]string{"kubeadm", "token", "create", bootstrapToken, "--kubeconfig", adminConf},
		[]string{"sed", "-i", "s/--enable-bootstrap-token-auth=false/--enable-bootstrap-token-auth=true/", apiServerManifest},
		endAPIServer,
	); err != nil {
		return err
	}
	if err := r.tokenGets(ctx, "200"); err != nil { // once the API server has restarted
		return err
	}
	r.say("the token authenticates again, and kubeadm's bindings are back")
	if err := r.attempts(ctx, bootstrapToken); err != nil {
		return err
	}
	if err := r.kubeadmByToken(ctx); err != nil {
		return err
	}
	if r.WhileTokenWorks != nil {
		if err := r.WhileTokenWorks(ctx); err != nil {
			return err
		}
	}
	// A cluster that is kept must be in Muster's state.
	if err := r.admin(ctx,
		[]string{"kubectl", "--kubeconfig", adminConf, "-n", "kube-system", "delete", "secret", "--field-selector", "type=bootstrap.kubernetes.io/token"},
		[]string{"kubectl", "--kubeconfig", adminConf, "delete", "--ignore-not-found", "clusterrolebinding", "kubeadm:get-nodes", "kubeadm:kubelet-bootstrap", "kubeadm:node-autoapprove-bootstrap", "kubeadm:node-autoapprove-certificate-rotation"},
		[]string{"kubectl", "--kubeconfig", adminConf, "-n", "kube-public", "delete", "--ignore-not-found", "configmap/cluster-info", "role/kubeadm:bootstrap-signer-clusterinfo", "rolebinding/kubeadm:bootstrap-signer-clusterinfo"},
		[]string{"sed", "-i", "s/--enable-bootstrap-token-auth=true/--enable-bootstrap-token-auth=false/", apiServerManifest},
		endAPIServer,
	); err != nil {
		return err
	}
	if err := r.tokenGets(ctx, "401"); err != nil {
		return err
	}
	r.say("token, bindings and switch are gone again")
	return nil
}

const (
	adminConf         = "/etc/kubernetes/admin.conf"
	apiServerManifest = "/etc/kubernetes/manifests/kube-apiserver.yaml"
)

// endAPIServer avoids the wait until all its watches have ended: the kubelet starts it again by its manifest.
var endAPIServer = []string{"sh", "-c", "kill -KILL $(pidof kube-apiserver)"}

// admin runs an administrator's commands on node1. The API server may be restarting.
func (r *run) admin(ctx context.Context, commands ...[]string) error {
	for _, argv := range commands {
		err := until(ctx, func(ctx context.Context) error {
			_, err := r.at(ctx, "node1", argv...)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// tokenGets waits until a request with the bootstrap token is answered with that status.
func (r *run) tokenGets(ctx context.Context, status string) error {
	return until(ctx, func(ctx context.Context) error {
		out, err := r.at(ctx, attacker, "curl", "-sS", "--max-time", "60", "--cacert", "/root/ca.crt", "-H", "Authorization: Bearer "+bootstrapToken,
			"-o", "/dev/null", "-w", "%{http_code}", "https://"+node1API+"/api/v1/namespaces/kube-system/configmaps/kubeadm-config")
		if err != nil {
			return err
		}
		if out != status {
			return fmt.Errorf("the token gets HTTP %s, not %s", out, status)
		}
		return nil
	})
}

// kubeadmByToken runs kubeadm join with the token.
func (r *run) kubeadmByToken(ctx context.Context) error {
	// With the cluster's CA given, kubeadm goes all the way to the kubelet's request for a certificate.
	for path, content := range map[string]string{
		"/root/discovery.conf": "apiVersion: v1\nkind: Config\nclusters: [{name: \"\", cluster: {server: \"https://" + node1API + "\", certificate-authority: /root/ca.crt}}]\n",
		"/root/join.yaml":      joinConfiguration("  file: {kubeConfigPath: /root/discovery.conf}\n  tlsBootstrapToken: "+bootstrapToken, "5m"),
	} {
		if _, err := r.pipe(ctx, attacker, []byte(content), "sh", "-c", `cat > "$0"`, path); err != nil {
			return err
		}
	}
	const who = "kubeadm join with kubeadm's bootstrap token"
	said, err := r.kubeadmJoin(ctx, who)
	if err != nil {
		return err
	}
	var refusal string
	err = until(ctx, func(ctx context.Context) error { // kubeadm may have ended before the kubelet has asked
		kubelet, err := r.at(ctx, attacker, "cat", "/var/log/kubelet.log")
		if err != nil {
			return err
		}
		for line := range strings.Lines(kubelet) {
			if strings.Contains(line, "ValidatingAdmissionPolicy 'muster-node-certificates'") {
				refusal = line
				return nil
			}
		}
		return fmt.Errorf("%s failed, but not because its kubelet got no certificate: %s\n%s", who, said, tail(kubelet, 10))
	})
	if err != nil {
		return err
	}
	// Otherwise it would send requests during the following attempts.
	if _, err := r.at(ctx, attacker, "systemctl", "stop", "kubelet"); err != nil {
		return err
	}
	r.refused(who, "ADMISSION", refusal)
	return nil
}

// forTicket reports whether joinservice has filed the certificate request of that name for the ticket of a node.
func (r *run) forTicket(name, user string) bool {
	return user == "system:serviceaccount:muster-system:joinservice" && slices.ContainsFunc(r.report.Nodes, func(node string) bool {
		return strings.HasPrefix(name, "muster-"+node+"-client-") || strings.HasPrefix(name, "muster-"+node+"-serving-")
	})
}

// joined are the machines that got a ticket.
var joined = []string{"node2", "node5", "node6", "node7"}

// unchanged checks that no refused machine has left anything in the cluster.
func (r *run) unchanged(ctx context.Context) error {
	for _, resource := range []string{"nodes", "attestednodes"} {
		got, err := r.names(ctx, resource)
		if err != nil {
			return err
		}
		if !slices.Equal(got, r.report.Nodes) {
			return fmt.Errorf("%s: %v, want %v", resource, got, r.report.Nodes)
		}
		r.say("%s: %s", resource, strings.Join(got, ", "))
	}
	csrs, err := r.kubectl(ctx, "get", "csr", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.username} {.spec.signerName}{"\n"}{end}`)
	if err != nil {
		return err
	}
	for line := range strings.Lines(csrs) {
		f := strings.Fields(line)
		if len(f) == 3 && !slices.Contains(r.report.Nodes, strings.TrimPrefix(f[1], "system:node:")) && !r.forTicket(f[0], f[1]) {
			return fmt.Errorf("another client asked for a certificate: %s", line)
		}
	}
	// Requests are deleted some minutes after they were used, so the audit log has the grants.
	records, err := r.audit(ctx)
	if err != nil {
		return err
	}
	issued := map[string]bool{}
	for _, rec := range records {
		if rec.Event != ticketDecided && rec.Event != ticketIssued {
			continue
		}
		if !slices.Contains(joined, rec.Node) {
			return fmt.Errorf("another client was given something: %s", rec.line)
		}
		issued[rec.Node] = true
	}
	if len(issued) != len(joined) {
		return fmt.Errorf("the audit log does not even have the tickets of %s", strings.Join(joined, ", "))
	}
	r.say("certificate requests and tickets: only those of node1, %s", strings.Join(joined, ", "))
	return nil
}
