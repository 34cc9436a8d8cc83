//go:build kubernetes

package kubernetes

import (
	"bufio"
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-k8s/muster/lab/driver"
	"github.com/muster-k8s/muster/lab/labtest"
)

// workload is two pods that answer at the same port of each node. A drain must leave one of them.
const workload = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: answer, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: answer}}
  template:
    metadata: {labels: {app: answer}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 5
      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - {weight: 100, podAffinityTerm: {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: answer}}}}
      containers:
      - name: echo
        image: lab.muster.dev/echo:v1
        imagePullPolicy: IfNotPresent
        args: [serve, ":8080"]
        env:
        - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
        resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {cpu: 200m, memory: 64Mi}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: answer, namespace: default}
spec: {minAvailable: 1, selector: {matchLabels: {app: answer}}}
---
apiVersion: v1
kind: Service
metadata: {name: answer, namespace: default}
spec:
  type: NodePort
  selector: {app: answer}
  ports: [{port: 80, targetPort: 8080, nodePort: 30888}]
`

// longestGap bounds the time without an answer. One pod is always Ready, and no node that has one loses its power. A round over five nodes takes ten
// seconds at most, for those that boot or whose rules still name a pod that ends: three rounds, since two processors run six machines.
const longestGap = 30 * time.Second

// asks asks the workload all the time, as a load balancer would: a node that does not answer within a second is passed over for the next one. A line
// per round has the time in seconds and what was answered.
const asks = `
i=0
while :; do
  got=-
  for try in 1 2 3 4 5; do
    i=$((i % 5 + 1))
    if out=$(curl -sS --connect-timeout 1 --max-time 2 "http://192.168.77.$((10 + i)):30888/" 2>/dev/null); then got=$out; break; fi
  done
  echo "$(date +%s.%N) $got"
  sleep 0.2
done
`

// asked is what the workload has answered until now.
type asked struct {
	mu       sync.Mutex
	first    time.Time
	last     time.Time
	answers  int
	silent   int
	gap      time.Duration // the longest one
	gapEnded time.Time
	nodes    map[string]int // node that the pod was on → answers
}

func (a *asked) line(line string) {
	var at float64
	if _, err := fmt.Sscanf(line, "%f", &at); err != nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, answer, _ := strings.Cut(strings.TrimSpace(line), " ")
	when := time.UnixMicro(int64(at * 1e6))
	on, ok := strings.CutPrefix(answer, "node=")
	if !ok {
		a.silent++
		return
	}
	on, _, _ = strings.Cut(on, " ")
	a.nodes[on]++
	if a.answers++; a.answers == 1 {
		a.first = when
	} else if gap := when.Sub(a.last); gap > a.gap {
		a.gap, a.gapEnded = gap, when
	}
	a.last = when
}

// ask starts the workload, and asks it until the returned function is called, which reports what was answered.
func (c *cluster) ask(t *testing.T) (report func(t *testing.T)) {
	t.Helper()
	c.apply(t, workload)
	labtest.Eventually(t, func(ctx context.Context) error {
		_, err := c.kubectl(ctx, "rollout", "status", "deployment/answer", "--timeout=5s")
		return err
	})
	labtest.Eventually(t, func(ctx context.Context) error { // kube-proxy's rules follow
		_, err := c.At(ctx, driver.Owner, "", "curl", "-sS", "--max-time", "2", "http://"+address(1)+":30888/")
		return err
	})
	ctx, cancel := context.WithCancel(t.Context())
	cmd, err := c.Command(ctx, driver.Owner, "sh", "-c", asks)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a := &asked{nodes: map[string]int{}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for s := bufio.NewScanner(out); s.Scan(); {
			a.line(s.Text())
		}
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		<-ended
		_ = cmd.Wait() // it was killed
	})
	t.Cleanup(stop)
	return func(t *testing.T) {
		t.Helper()
		stop()
		a.mu.Lock()
		defer a.mu.Unlock()
		t.Logf("the workload answered %d times in %s, from pods on %v; %d rounds over all nodes without an answer; the longest gap was %.1f s, and ended at %s",
			a.answers, a.last.Sub(a.first).Round(time.Second), a.nodes, a.silent, a.gap.Seconds(), a.gapEnded.Format(time.TimeOnly))
		if since := time.Since(a.last); a.answers == 0 || a.gap > longestGap || since > longestGap {
			t.Errorf("the workload did not answer for %s, and last %s ago: want at most %s", a.gap, since, longestGap)
		}
		if a.nodes[node(planes+1)] == 0 || a.nodes[node(planes+2)] == 0 {
			t.Error("the pods did not move from one worker to the other, so no drain was shown")
		}
	}
}
